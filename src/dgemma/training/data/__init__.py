"""Training data: records to examples, their order, and the corrupted canvases of a batch."""
