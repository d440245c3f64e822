"""Text around the model: token ids in and out, chats, replies. Knows no tensors and no models.

This package file imports nothing, so that each part can be loaded alone.
"""
