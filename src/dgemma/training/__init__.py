"""Fine-tuning: data, objective, trainer. Knows models and text, never requests or servers."""
