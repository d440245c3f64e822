"""POST /v1/edit/completions."""
