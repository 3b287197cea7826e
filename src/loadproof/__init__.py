"""loadproof: LLM serving whose answer never depends on the load."""

__version__ = "0.1.0"
