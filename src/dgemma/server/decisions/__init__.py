"""POST /v1/decisions and POST /v1/systemone."""
