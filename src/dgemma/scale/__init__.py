"""More than one process: ranks that compute one model together."""
