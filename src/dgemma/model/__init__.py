"""The network: a MoE transformer with two passes over one set of weights, `encode` and `denoise`.

This package file imports nothing, so that `dgemma.model.config` can be imported without torch.
"""
