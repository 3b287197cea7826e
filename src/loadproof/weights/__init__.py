"""Checkpoint readers, and from a model name to local files."""
