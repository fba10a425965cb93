"""Diagrams of plans as text and as images."""
