"""Tasks that come with dgemma, and tasks of the user's."""
