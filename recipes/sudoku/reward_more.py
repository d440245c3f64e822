"""The same with more weight on few steps, and bolder: `dgemma train recipes/sudoku/reward_more.py`."""

from dataclasses import replace

from dgemma.training.reward import RolloutAnswer
from recipes.sudoku.reward import graded
from recipes.sudoku.reward import recipe as reward


def solved_sooner(answer: RolloutAnswer) -> float:
    return graded(answer, cost_of_steps=0.8, most_for_parts=0.1)


recipe = replace(
    reward,
    out="runs/sudoku/reward_more",
    rollout=replace(reward.rollout, reward=solved_sooner),
    optimizer=replace(reward.optimizer, learning_rate=1e-3),
    seed=1,
)
