"""The network: one stack of weights with two doors, `encode` and `denoise`.

This package file imports nothing, so that `dgemma.model.config` can be read without torch.
"""
