"""Sudoku: grids, their symmetries, the held-out puzzles, and the tokens of the bundled model. No torch."""
