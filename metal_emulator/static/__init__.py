"""The static check of Metal text."""
