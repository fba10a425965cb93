"""Layers of which each machine of a group holds a part."""
