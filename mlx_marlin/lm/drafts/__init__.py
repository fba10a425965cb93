"""Drafts of the next tokens, verified by the model in one pass of several rows."""
