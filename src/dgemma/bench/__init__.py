"""Measuring: ways run in turn, spreads instead of single figures."""
