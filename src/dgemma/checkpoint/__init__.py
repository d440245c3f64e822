"""Checkpoints: the released layout on disk and our modules, and nothing else."""
