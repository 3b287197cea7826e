"""The commands of ``loadproof``, one a file; each is imported when it is called."""
