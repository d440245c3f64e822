"""Fast products with weights in few bits. Each has a plain twin in `model.coded_weight`."""
