"""POST /v1/completions and POST /v1/fim/completions."""
