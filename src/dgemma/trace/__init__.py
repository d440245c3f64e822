"""Traces: a record of what a generation did, step by step. Imports no torch."""
