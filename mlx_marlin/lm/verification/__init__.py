"""Compares the layers of a model with float64 products and with their source."""
