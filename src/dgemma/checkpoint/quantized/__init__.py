"""Quantized checkpoints: the formats other tools publish, and writing our own in one of them."""
