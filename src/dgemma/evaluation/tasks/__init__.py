"""The tasks of dgemma, and tasks of the user."""
