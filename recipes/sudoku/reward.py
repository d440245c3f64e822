"""Solved puzzles are rewarded, sooner ones more: `dgemma train recipes/sudoku/reward.py`.

From the shipped weights. Eight answers to each puzzle are compared with each other. Only puzzles
without added clues or with few: of the others all answers are right, and nothing is learned.
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
    RolloutRecipe,
    SavingRecipe,
)
from dgemma.training.reward import RolloutAnswer

STEPS = 24


def graded(answer: RolloutAnswer, *, cost_of_steps: float, most_for_parts: float) -> float:
    """1 for a solution, less the cost of all steps by their share; otherwise by the share of right tokens."""
    if answer.tokens == answer.expected:
        return 1.0 - cost_of_steps * answer.steps / STEPS
    right = sum(a == b for a, b in zip(answer.tokens, answer.expected, strict=True))
    return most_for_parts * right / len(answer.expected)


def solved_soon(answer: RolloutAnswer) -> float:
    return graded(answer, cost_of_steps=0.3, most_for_parts=0.5)


puzzles = Presentations(
    read_puzzles("data/sudoku/train.csv.xz"),
    count=1 << 40,
    seed=5,
    curriculum=Curriculum(fewest=18, most=28, skew=3.0),
)
unseen = Presentations(held_out("medium"), count=1000, curriculum=None)

recipe = Recipe(
    model="bundled:sudoku",
    out="runs/sudoku/reward",
    data=DataRecipe(records=puzzles, max_length=EXAMPLE_LEN, shuffle=False),
    held_out=HeldOutRecipe(
        data=DataRecipe(records=unseen, max_length=EXAMPLE_LEN, shuffle=False), every=40, examples=128
    ),
    train="all",
    freeze=(),
    objective="reward",
    rollout=RolloutRecipe(reward=solved_soon, samples=8, steps=STEPS),
    noise=NoiseRecipe(encoder_weight=0.1),
    optimizer=OptimizerRecipe(
        kind="muon",
        learning_rate=2e-4,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        warmup=0.05,
        decay="linear",
        final=0.1,
    ),
    steps=80,
    batch=4,
    precision="auto",
    saving=SavingRecipe(every=20),
)
