"""C++ for CPUs, compiled on the user's machine at first use. Each kernel has a reference in torch."""
