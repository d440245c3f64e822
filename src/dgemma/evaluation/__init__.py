"""Tasks with a score: what a model can do, with how many steps, and how sure we are."""
