"""Run oracle and ours side by side over a small life of a sequence, and collect the differences."""

from __future__ import annotations

import torch
from torch import Tensor

from dgemma.language_model import LanguageModel
from dgemma.model.cache import KVCache
from oracle import Case, encoder_logits, oracle_cache, tokens


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    difference = (a.float() - b.float()).abs().max().item()
    return difference if difference == difference else float("inf")  # NaN counts as infinite


@torch.no_grad()
def compare_sequence(oracle: object, ours: LanguageModel, case: Case, length: int) -> dict[str, float]:
    """Prompt, two steps with and without self-conditioning, commit, next canvas; caches in between."""
    prompt = tokens(case, 1, length, seed=length)
    canvas = tokens(case, 1, case.canvas_len, seed=length + 1)
    second = tokens(case, 1, case.canvas_len, seed=length + 2)
    past, cache = oracle_cache(oracle), ours.new_cache()
    found = {}

    theirs = oracle(input_ids=prompt, decoder_input_ids=canvas, past_key_values=past)
    hidden = ours.encode(prompt, cache)
    found["encode"] = worst(ours.logits(hidden), encoder_logits(oracle, theirs.encoder_last_hidden_state))
    found["cache"] = compare_cache(past, cache)
    logits = ours.logits(ours.denoise(canvas, cache))
    found["first step"] = worst(logits, theirs.logits)

    theirs = oracle(decoder_input_ids=second, past_key_values=past, self_conditioning_logits=theirs.logits)
    logits = ours.logits(ours.denoise(second, cache, ours.soft_embedding(logits)))
    found["self-conditioned step"] = worst(logits, theirs.logits)

    for number in range(2):  # commit twice: several canvases in sequence
        committed = tokens(case, 1, case.canvas_len, seed=length + 3 + number)
        theirs = oracle(input_ids=committed, decoder_input_ids=canvas, past_key_values=past)
        hidden = ours.encode(committed, cache)
        found[f"commit {number}"] = worst(
            ours.logits(hidden), encoder_logits(oracle, theirs.encoder_last_hidden_state)
        )
        found[f"cache after commit {number}"] = compare_cache(past, cache)
        logits = ours.logits(ours.denoise(canvas, cache))
        found[f"step after commit {number}"] = worst(logits, theirs.logits)
    return found


def compare_cache(past: object, cache: KVCache, row: int = 0) -> float:
    """Largest difference of cached keys and values, for the positions the oracle still holds."""
    context = cache.context()
    length = context.host_lengths[row]
    found = 0.0
    for index, layer in enumerate(past.layers):
        held = layer.keys.shape[2]
        slots = context.keys[index].shape[1]
        if slots < held:  # a token is gone that the oracle still sees
            return float("inf")
        places = torch.arange(length - held, length) % slots
        for theirs, stored in ((layer.keys, context.keys), (layer.values, context.values)):
            found = max(found, worst(stored[index][row, places].transpose(0, 1), theirs[0]))
    return found
