"""Both doors equal the reference in fp32, on every geometry and context length that matters."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from comparison import Layers, Recorded, cached, compare_layers, compare_recorded, record_sequence, worst
from dgemma.model.execution import Execution
from oracle import CASES, Case, make_oracle, make_ours, oracle_cache, tokens

TOLERANCE = 1e-4
WAYS = {
    "plain": Execution(),
    "by expert": Execution(grouped_experts=False),
    "exact": Execution(exact=True, encode_block=4, expert_tile=4),
    "training": Execution(expert_block=8, explicit_attention=True),
}


def lengths(case: Case) -> list[int]:
    around = range(case.window - 2, case.window + 3)
    return sorted({max(1, n) for n in (*around, 3 * case.window, 1)})


@cache
def recorded(case: Case, length: int) -> Recorded:
    """The oracle computes a sequence once for all ways."""
    return record_sequence(make_oracle(case), case, length)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_cache_equal_the_oracle(case: Case, way: str) -> None:
    ours = make_ours(make_oracle(case), execution=WAYS[way])
    for length in lengths(case):
        found = compare_recorded(recorded(case, length), ours)
        assert max(found.values()) <= TOLERANCE, (length, found)


@cache
@torch.no_grad()
def row_alone(case: Case, text: tuple[int, ...], canvas: tuple[int, ...]) -> tuple[Tensor, Layers, Tensor]:
    """-> the oracle's logits, its cache, its logits of a self-conditioned second step."""
    oracle, past = make_oracle(case), oracle_cache(make_oracle(case))
    tokens, noisy = torch.tensor([text]), torch.tensor([canvas])
    first = oracle(input_ids=tokens, decoder_input_ids=noisy, past_key_values=past).logits
    held = cached(past)
    second = oracle(decoder_input_ids=noisy, past_key_values=past, self_conditioning_logits=first).logits
    return first, held, second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_rows_of_different_lengths_equal_the_oracle_alone(case: Case, way: str) -> None:
    ours = make_ours(make_oracle(case), execution=WAYS[way])
    w = case.window
    first, second = [1, 3 * w, w, w + 1], [2 * w + 3, 1, 5, 0]
    width = max(first)
    prompt = tokens(case, len(first), width, seed=1)
    more = tokens(case, len(first), max(second), seed=2)
    canvas = tokens(case, len(first), case.canvas_len, seed=3)
    cache = ours.new_cache(batch=len(first))
    ours.encode(prompt, cache, lengths=first)
    ours.encode(more, cache, lengths=second)
    logits = ours.logits(ours.denoise(canvas, cache))
    soft = ours.soft_embedding(logits)
    again = ours.logits(ours.denoise(canvas, cache, soft))
    for row in range(len(first)):
        text = (*prompt[row, : first[row]].tolist(), *more[row, : second[row]].tolist())
        their_first, held, their_second = row_alone(case, text, tuple(canvas[row].tolist()))
        assert worst(logits[row : row + 1], their_first) <= TOLERANCE
        assert compare_layers(held, cache, row) <= TOLERANCE
        assert worst(again[row : row + 1], their_second) <= TOLERANCE


@torch.no_grad()
def test_a_prompt_longer_than_one_chunk_equals_the_oracle() -> None:
    case = CASES[3]
    oracle = make_oracle(case)
    prompt, canvas = tokens(case, 1, 2500, seed=1), tokens(case, 1, case.canvas_len, seed=2)
    theirs = oracle(input_ids=prompt, decoder_input_ids=canvas, past_key_values=oracle_cache(oracle))
    for execution in (Execution(), Execution(exact=True)):
        ours = make_ours(oracle, execution=execution)
        cache = ours.new_cache()
        hidden = ours.encode(prompt, cache)
        assert worst(hidden, theirs.encoder_last_hidden_state) <= TOLERANCE
        assert worst(ours.logits(ours.denoise(canvas, cache)), theirs.logits) <= TOLERANCE


@torch.no_grad()
def test_all_tokens_go_to_one_expert_where_the_case_says_so() -> None:
    case = next(case for case in CASES if case.one_expert)
    ours = make_ours(make_oracle(case))
    chosen: list[torch.Tensor] = []
    for layer in ours.transformer.layers:
        layer.router.register_forward_hook(lambda module, args, out: chosen.append(out[1]))
    cache = ours.new_cache()
    ours.encode(tokens(case, 1, 20, seed=1), cache)
    ours.denoise(tokens(case, 1, case.canvas_len, seed=2), cache)
    assert len(chosen) == 2 * len(ours.config.layers)
    assert all((experts == 0).all() for experts in chosen)
