"""Many requests through one set of weights: who is computed when, and what is kept of them."""
