"""Images as the models take them, from untrusted bytes (no torch)."""
