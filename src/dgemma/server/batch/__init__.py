"""Batch files: many request bodies answered without HTTP."""
