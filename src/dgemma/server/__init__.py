"""The server: HTTP endpoints and batch files over one engine. Imports no torch."""
