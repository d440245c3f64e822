"""Sudoku: grids, their symmetries, the held-out puzzles, and the tokens the bundled model reads. No torch."""
