"""A base that knows grids and not Sudoku: Latin squares, from random weights.

dgemma train recipes/sudoku/latin.py
"""

from dgemma.sudoku.grid_records import EXAMPLE_LEN
from dgemma.sudoku.latin_squares import LatinSquares
from dgemma.training.recipe import DataRecipe, NoiseRecipe, OptimizerRecipe, Recipe, SavingRecipe

recipe = Recipe(
    model="runs/sudoku/start",
    out="runs/sudoku/latin",
    data=DataRecipe(records=LatinSquares(count=1 << 40), max_length=EXAMPLE_LEN, shuffle=False),
    train="all",
    freeze=(),
    noise=NoiseRecipe(encoder_weight=0.0, power=0.5),
    optimizer=OptimizerRecipe(
        kind="muon",
        learning_rate=3e-3,
        betas=(0.9, 0.99),
        weight_decay=1e-2,
        warmup=0.02,
        decay="linear",
        final=0.05,
    ),
    steps=500,
    batch=64,
    compile=True,
    saving=SavingRecipe(every=200),
)
