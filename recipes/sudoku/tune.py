"""Sudoku as an adapter on the base of `latin.py`: `dgemma train recipes/sudoku/tune.py`."""

from dgemma.model.lora import LoraSettings
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
    curriculum=Curriculum(first_fewest=40, fewest=18, most=50, skew=2.0, ramp=20_000),
)
unseen = Presentations(held_out("medium"), count=1000, curriculum=None)

recipe = Recipe(
    model="runs/sudoku/latin/model",
    out="runs/sudoku/tune",
    data=DataRecipe(records=puzzles, max_length=EXAMPLE_LEN, shuffle=False),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=unseen, max_length=EXAMPLE_LEN, shuffle=False), every=500, examples=256
    ),
    train="lora",
    lora=LoraSettings(rank=32, expert_rank=8),
    noise=NoiseRecipe(encoder_weight=0.0, power=0.5, guesses=2),
    optimizer=OptimizerRecipe(
        learning_rate=3e-3, betas=(0.9, 0.99), weight_decay=0.0, warmup=0.02, decay="linear", final=0.05
    ),
    steps=600,
    batch=64,
    compile=True,
    saving=SavingRecipe(every=250),
)
