"""The OpenAI-compatible HTTP server: schemas, routes, streaming, metrics, the page at ``/``."""
