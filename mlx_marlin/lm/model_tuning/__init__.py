"""Finds the settings of `optimize` with which a model generates fastest here."""
