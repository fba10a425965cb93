"""Products of rows with experts' weights."""
