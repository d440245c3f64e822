"""POST /v1/responses, and the responses it keeps."""
