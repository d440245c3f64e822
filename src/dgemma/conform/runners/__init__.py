"""Scripts that run another runtime on a case, in its own environment: they import nothing of dgemma."""
