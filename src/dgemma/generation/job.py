"""What is to be generated: prompts as token ids, a seed for each, and how long an answer may be."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from dgemma.errors import InputError
from dgemma.model.config import ModelConfig
from dgemma.params import GenerationParams

Ids = tuple[int, ...]

DEFAULT_MAX_TOKENS = 1024


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


def check_prompt(prompt: Sequence[int], vocab_size: int, which: str = "the prompt") -> None:
    if not prompt:
        raise InputError(f"{which} is empty; give it at least one token.")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"{which} holds token {wrong}; this vocabulary ends at {vocab_size - 1}.")


def most_tokens(config: ModelConfig, prompt_len: int, asked: int | None) -> int:
    """How many tokens may be written: whole canvases must fit behind the prompt."""
    room = max(0, config.max_positions - prompt_len) // config.canvas_len * config.canvas_len
    if room == 0:
        raise InputError(
            f"the prompt has {prompt_len} tokens; this model's context of {config.max_positions} then has no "
            f"room for a canvas of {config.canvas_len}. Shorten the prompt."
        )
    if asked is not None and asked > room:
        raise InputError(
            f"max_tokens is {asked}; this model's context leaves {room}. Lower it or shorten the prompt."
        )
    return min(DEFAULT_MAX_TOKENS, room) if asked is None else asked


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
