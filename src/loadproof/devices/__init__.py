"""Executors of a Graph."""
