"""Run oracle and ours side by side over a small life of a sequence, and collect the differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.language_model import LanguageModel
from dgemma.model.kv_cache import KVCache
from oracle import Case, encoder_logits, oracle_cache, tokens


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    difference = (a.float() - b.float()).abs().max().item()
    return difference if difference == difference else float("inf")  # NaN counts as infinite


Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of a cache, layer by layer."""


@dataclass(frozen=True)
class Recorded:
    """What the oracle computed over one sequence, for any number of comparisons."""

    case: Case
    length: int
    outputs: dict[str, Tensor]
    caches: dict[str, Layers]


@torch.no_grad()
def record_sequence(oracle: object, case: Case, length: int) -> Recorded:
    """Prompt, two steps with and without self-conditioning, commit, next canvas; caches in between."""
    past = oracle_cache(oracle)
    outputs, caches = {}, {}
    prompt, canvas, second, *commits = sequence_tokens(case, length)
    theirs = oracle(input_ids=prompt, decoder_input_ids=canvas, past_key_values=past)
    outputs["encode"] = encoder_logits(oracle, theirs.encoder_last_hidden_state)
    outputs["first step"] = theirs.logits
    caches["cache"] = cached(past)
    theirs = oracle(decoder_input_ids=second, past_key_values=past, self_conditioning_logits=theirs.logits)
    outputs["self-conditioned step"] = theirs.logits
    for number, committed in enumerate(commits):
        theirs = oracle(input_ids=committed, decoder_input_ids=canvas, past_key_values=past)
        outputs[f"commit {number}"] = encoder_logits(oracle, theirs.encoder_last_hidden_state)
        outputs[f"step after commit {number}"] = theirs.logits
        caches[f"cache after commit {number}"] = cached(past)
    return Recorded(case, length, outputs, caches)


@torch.no_grad()
def compare_recorded(recorded: Recorded, ours: LanguageModel) -> dict[str, float]:
    cache = ours.new_cache()
    found = {}

    def compare(name: str, logits: Tensor) -> None:
        found[name] = worst(logits, recorded.outputs[name])

    def compare_held(name: str) -> None:
        found[name] = compare_layers(recorded.caches[name], cache)

    prompt, canvas, second, *commits = sequence_tokens(recorded.case, recorded.length)
    compare("encode", ours.logits(ours.encode(prompt, cache)))
    compare_held("cache")
    logits = ours.logits(ours.denoise(canvas, cache))
    compare("first step", logits)
    compare("self-conditioned step", ours.logits(ours.denoise(second, cache, ours.soft_embedding(logits))))
    for number, committed in enumerate(commits):
        compare(f"commit {number}", ours.logits(ours.encode(committed, cache)))
        compare_held(f"cache after commit {number}")
        compare(f"step after commit {number}", ours.logits(ours.denoise(canvas, cache)))
    return found


def compare_sequence(oracle: object, ours: LanguageModel, case: Case, length: int) -> dict[str, float]:
    return compare_recorded(record_sequence(oracle, case, length), ours)


def sequence_tokens(case: Case, length: int) -> list[Tensor]:
    """The prompt, two canvases to denoise, and two to commit: several canvases in sequence."""
    lengths = [length, *[case.canvas_len] * 4]
    return [tokens(case, 1, size, seed=length + number) for number, size in enumerate(lengths)]


def cached(past: object) -> Layers:
    return [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]


def compare_layers(layers: Layers, cache: KVCache, row: int = 0) -> float:
    """Largest difference of cached keys and values, for the positions the oracle still holds."""
    context = cache.context()
    length = context.host_lengths[row]
    found = 0.0
    for index, (keys, values) in enumerate(layers):
        held = keys.shape[2]
        slots = context.keys[index].shape[1]
        if slots < held:  # a token is gone that the oracle still sees
            return float("inf")
        places = torch.arange(length - held, length) % slots
        for theirs, stored in ((keys, context.keys), (values, context.values)):
            found = max(found, worst(stored[index][row, places].transpose(0, 1), theirs[0]))
    return found
