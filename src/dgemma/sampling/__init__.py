"""One sampler step: tensors in, tensors out. Imports no model, no text, no requests."""
