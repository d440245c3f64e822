"""Hard puzzles, thought about more than once: `dgemma train recipes/sudoku/deepen.py`.

From the weights of `learn.py`. Half of the canvases are learned after guesses: up to four, each made after
the one before, which is how inference comes to a hard puzzle's end. The learning rate stays where it is, so
`steps=N` prolongs the run; `settle.py` lets it fall.
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
    seed=1,  # other symmetries and clues than before
    curriculum=Curriculum(fewest=18, most=50, skew=2.0),
)
unseen = Presentations(held_out("medium"), count=1000, curriculum=None)

recipe = Recipe(
    model="runs/sudoku/learn/model",
    out="runs/sudoku/deepen",
    data=DataRecipe(records=puzzles, max_length=EXAMPLE_LEN, shuffle=False),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=unseen, max_length=EXAMPLE_LEN, shuffle=False), every=500, examples=256
    ),
    train="all",
    freeze=(),
    noise=NoiseRecipe(encoder_weight=0.0, power=0.5, guesses=4),
    optimizer=OptimizerRecipe(
        kind="muon", learning_rate=3e-3, betas=(0.9, 0.99), weight_decay=1e-2, warmup=0.01, decay="constant"
    ),
    steps=649,
    batch=64,
    seed=1,
    compile=True,
    saving=SavingRecipe(every=250),
)
