"""The training forward is the reference's, on the same corrupted batch; and it is what inference runs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from comparison import worst
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.objective import hidden_states, token_losses
from oracle import CASES, Case, calm_oracle, encoder_logits, make_ours, oracle_cache, tokens
from sizes import cases

TOLERANCE = 1e-5
EOS = 1


def batch_of(case: Case, vocab_size: int, *, first: int = 0) -> tuple[list[TrainingExample], TrainingBatch]:
    """Replies of three canvases behind prompts that are longer than the window, and a short one."""
    examples = []
    for row, prompt in enumerate((3 * case.window + 1, case.window, 2, 1)):
        reply = 2 * case.canvas_len + 1 + row
        ids = tuple(tokens(case, 1, prompt + reply, seed=20 + row)[0].tolist())
        examples.append(TrainingExample(ids, (Span(prompt, prompt + reply),)))
    settings = CanvasSettings(
        canvas_len=case.canvas_len, vocab_size=vocab_size, fill_token=EOS, seed=case.seed, guesses=2
    )
    return examples, make_batch(examples, range(first, first + len(examples)), settings)


@cache
@torch.no_grad()
def oracle_losses(case: Case, vocab_size: int, first: int) -> tuple[Tensor, Tensor]:
    """Row by row: the reference's encoder over the clean text, its decoder behind a cache of what the canvas
    may see, fed back its own logits where the coin says so."""
    oracle = calm_oracle(case)
    examples, batch = batch_of(case, vocab_size, first=first)
    diffusion, encoder = [], []
    for row, example in enumerate(examples):
        clean = torch.tensor([example.tokens])
        whole = oracle.model.encoder(input_ids=clean, past_key_values=oracle_cache(oracle))
        logits = encoder_logits(oracle, whole.last_hidden_state)[0]
        span = example.responses[0]
        predicted, follows = logits[span.start - 1 : span.stop - 1], clean[0, span.start : span.stop]
        encoder.append(F.cross_entropy(predicted, follows, reduction="none"))
        past = oracle_cache(oracle)
        start = int(batch.starts[row])
        noisy = batch.noisy[row : row + 1]
        theirs = oracle(input_ids=clean[:, :start], decoder_input_ids=noisy, past_key_values=past)
        for _ in range(num_guesses(batch, row)):
            theirs = oracle(
                decoder_input_ids=noisy, past_key_values=past, self_conditioning_logits=theirs.logits
            )
        diffusion.append(F.cross_entropy(theirs.logits[0], batch.clean[row], reduction="none"))
    return torch.stack(diffusion), torch.cat(encoder)


def num_guesses(batch: TrainingBatch, row: int) -> int:
    return sum(row in rows.tolist() for rows in batch.guessed)


WAYS = {"plain": Execution(), "small models": Execution(expert_block=8, explicit_attention=True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_equal_those_of_the_oracles_logits(case: Case, way: str) -> None:
    ours = make_ours(calm_oracle(case), execution=WAYS[way])
    canvases, guesses = set(), set()
    for first in (0, 4, 8):
        examples, batch = batch_of(case, ours.config.vocab_size, first=first)
        found = token_losses(ours.transformer, batch, rows_at_once=5)
        diffusion, encoder = oracle_losses(case, ours.config.vocab_size, first)
        counted = batch.encoder_weights > 0
        assert worst(found.diffusion, diffusion) <= 1e-4
        assert worst(found.encoder[counted], encoder) <= 1e-4
        assert abs(found.diffusion.mean() - diffusion.mean()) <= TOLERANCE
        assert abs(found.encoder[counted].mean() - encoder.mean()) <= TOLERANCE
        for row, example in enumerate(examples):
            canvases.add(int(batch.starts[row] - example.responses[0].start) // case.canvas_len)
        guesses |= {num_guesses(batch, row) for row in range(len(examples))}
    assert canvases == {0, 1, 2}
    assert guesses == {0, 1, 2}


@pytest.mark.parametrize("case", CASES[:: cases(1, 3)], ids=lambda case: case.name)
@torch.no_grad()
def test_the_training_forward_and_the_passes_of_inference_give_the_same_logits(case: Case) -> None:
    lm = make_ours(calm_oracle(case))
    for layer in lm.transformer.layers:  # calmer still: a self-conditioned step rounds twice as often
        layer.after_attention.weight *= 0.5
        layer.after_both.weight *= 0.5
    seen: set[tuple[int, int]] = set()
    first = 0
    while {canvas for row, canvas in seen if row == 0} != {0, 1, 2}:  # its prompt is three windows long
        examples, batch = batch_of(case, lm.config.vocab_size, first=first)
        encoded, denoised = hidden_states(lm.transformer, batch, rows_at_once=5)
        for row, example in enumerate(examples):
            start = int(batch.starts[row])
            seen.add((row, (start - example.responses[0].start) // case.canvas_len))
            assert worst(lm.logits(denoised[row : row + 1]), infer(lm, example, batch, row)) <= TOLERANCE
            alone = lm.encode(torch.tensor([example.tokens]), lm.new_cache())
            assert worst(lm.logits(encoded[row : row + 1, : len(example.tokens)]), lm.logits(alone)) <= 1e-5
        first += len(examples)


def infer(lm: LanguageModel, example: TrainingExample, batch: TrainingBatch, row: int) -> Tensor:
    """Logits of a step as generation has them: prompt, then whole canvases, committed one by one."""
    cache = lm.new_cache()
    prompt = example.responses[0].start
    lm.encode(torch.tensor([example.tokens[:prompt]]), cache)
    for at in range(prompt, int(batch.starts[row]), batch.clean.shape[1]):
        lm.encode(torch.tensor([example.tokens[at : at + batch.clean.shape[1]]]), cache)
    canvas = batch.noisy[row : row + 1]
    logits = lm.logits(lm.denoise(canvas, cache))
    for _ in range(num_guesses(batch, row)):
        logits = lm.logits(lm.denoise(canvas, cache, lm.soft_embedding(logits)))
    return logits
