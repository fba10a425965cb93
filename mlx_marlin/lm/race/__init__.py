"""The race: a model's products and forward passes, timed once on this machine."""
