"""What is to be generated: prompts as token ids, one seed for each, and how."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.diffusion.step import Sampler
from dgemma.errors import InputError
from dgemma.generation.turns import TurnMemory
from dgemma.params import GenerationParams
from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts to be answered together."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    params: GenerationParams
    tokenizer: Tokenizer | None = None  # without one, answers are tokens only
    sampler: Sampler | None = None  # in place of the one that `params` describe
    memory: TurnMemory | None = None  # of a chat: one prompt only
    drafts: bool = False


def read_prompts(prompt: Any, to_ids: Callable[[str], Ids]) -> tuple[list[Ids], bool]:
    """Token ids of each prompt, and whether it was a list of them."""
    if isinstance(prompt, str):
        return [to_ids(prompt)], False
    if not isinstance(prompt, Sequence):
        raise InputError(f"prompt is a {type(prompt).__name__}; give text, token ids, or a list of either.")
    if not prompt:
        raise InputError("prompt is an empty list; give at least one prompt.")
    if all(isinstance(item, str) for item in prompt):
        return [to_ids(item) for item in prompt], True
    if all(map(_is_token, prompt)):
        return [tuple(prompt)], False
    if all(isinstance(item, Sequence) and all(map(_is_token, item)) for item in prompt):
        return [tuple(item) for item in prompt], True
    raise InputError("prompt is a list of mixed things; give texts only, or lists of token ids only.")


def seeds_for(count: int, seeds: Sequence[int] | None, params: GenerationParams) -> tuple[int, ...]:
    """One seed per prompt: as given, else counted up from the one of `params`, else from a fresh one."""
    if seeds is None:
        # Short enough to be typed again.
        first = secrets.randbits(32) if params.seed is None else params.seed
        return tuple(first + row for row in range(count))
    if len(seeds) != count:
        raise InputError(f"seeds has {len(seeds)} numbers for {count} prompts; give one for each.")
    for seed in seeds:
        GenerationParams(seed=seed)  # checked like `seed`
    return tuple(seeds)


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
