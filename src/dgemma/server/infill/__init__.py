"""POST /infill, the endpoint of llama.cpp's server."""
