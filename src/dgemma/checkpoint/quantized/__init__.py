"""Quantized checkpoints: reading the formats of other tools, and writing one of them."""
