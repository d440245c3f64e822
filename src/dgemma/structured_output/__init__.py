"""Structured output: response formats compiled to DFAs on the tokens of a vocabulary. No torch."""
