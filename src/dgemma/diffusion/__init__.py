"""One step of the sampler: tensors in, tensors out. Knows no model, no text, no requests."""
