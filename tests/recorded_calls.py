"""Random calls of every method that generates, to be recorded."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

from dgemma import InputError, LanguageModel
from dgemma.trace.trace import Trace

WORDS = ("The sea is", "Once upon a time", "def add(a, b):", "In 1969", "Dear Ann,")
KINDS = ("generate", "batch", "chat", "pins", "regex", "choice", "tools", "fill", "edit", "causal")


def random_call(lm: LanguageModel, rng: random.Random) -> None:
    seed = rng.randrange(1 << 32)
    prompt = rng.choice(WORDS)
    kind = rng.choice(KINDS)
    options: dict[str, Any] = {
        "seed": seed,
        "max_tokens": rng.randint(1, 40),
        "acceptance": rng.choice(("entropy_bound", "confidence", "fixed")),
        "temperature": rng.choice((0.0, 0.8, 1.0)),
        "max_denoising_steps": rng.randint(1, 4),
    }
    if rng.random() < 0.3:
        options["logprobs"] = 3
    if seed % 3 == 0:
        options["canvas_len"] = "auto"
    if kind == "generate":
        lm.generate(prompt, **options)
    elif kind == "batch":
        lm.generate([prompt, *rng.sample(WORDS, 2)], **options)
    elif kind == "chat":
        lm.chat(prompt, **options)
    elif kind == "pins":
        places = rng.sample(range(options["max_tokens"]), k=min(3, options["max_tokens"]))
        lm.generate(prompt, pins={at: rng.randrange(200, 300) for at in places}, **options)
    elif kind == "regex":
        lm.generate(prompt, regex="[a-c]{2,9}[0-9]?", **{**options, "max_tokens": 20})
    elif kind == "choice":
        lm.chat(prompt, choice=["yes", "no", "perhaps"], **{**options, "max_tokens": 20})
    elif kind == "tools":
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        lm.chat(prompt, tools=[tool], tool_choice="required", **{**options, "max_tokens": 40})
    elif kind == "fill":
        with suppress(InputError):  # a random model may find no text that fits; what it tried is recorded
            lm.fill(prompt, " because.", seed=seed, lengths=[2, 3], regex="[a-z ]{1,9}" if seed % 2 else None)
    elif kind == "edit":
        lm.edit("The see is salty and blue.", seed=seed)
    else:
        decode = rng.choice(("causal", "lossless", "verified", "auto"))
        options.pop("acceptance")
        lm.generate(prompt, decode=decode, draft_steps=2, **{**options, "max_tokens": 12})


def recorded(lm: LanguageModel, seed: int) -> Trace:
    with lm.record("test") as recorder:
        random_call(lm, random.Random(seed))
    return recorder.trace()
