"""The last part: the learning rate falls, and the encoder learns to write too.

    dgemma train recipes/sudoku/settle.py

It begins with the weights `deepen.py` ended with. The encoder's loss teaches the causal mode to write answers
left to right, which nothing but the comparison with that needs.
"""

from dgemma.sudoku.grid_records import EXAMPLE_LEN
from dgemma.sudoku.presentations import Curriculum, Presentations
from dgemma.sudoku.puzzles import held_out, read_puzzles
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)

puzzles = Presentations(
    read_puzzles("data/sudoku/train.csv.xz"),
    count=1 << 40,
    seed=2,  # other symmetries and clues than before
    curriculum=Curriculum(fewest=18, most=50, skew=2.0),
)
unseen = Presentations(held_out("medium"), count=1000, curriculum=None)

recipe = Recipe(
    model="runs/sudoku/deepen/model",
    out="runs/sudoku/settle",
    data=DataRecipe(records=puzzles, max_length=EXAMPLE_LEN, shuffle=False),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=unseen, max_length=EXAMPLE_LEN, shuffle=False), every=500, examples=256
    ),
    train="all",
    freeze=(),
    noise=NoiseRecipe(encoder_weight=0.2, power=0.5, guesses=4),
    optimizer=OptimizerRecipe(
        kind="muon",
        learning_rate=3e-3,
        betas=(0.9, 0.99),
        weight_decay=1e-2,
        warmup=0.02,
        decay="linear",
        final=0.02,
    ),
    steps=1400,
    batch=64,
    seed=2,
    compile=True,
    saving=SavingRecipe(every=250),
)
