"""Held-out data gets noise of its own, and the same in every look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgemma.training import held_out
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.held_out import evaluate_held_out
from dgemma.training.objective import TokenLosses

SETTINGS = CanvasSettings(canvas_len=8, vocab_size=50, fill_token=1, seed=7)
EXAMPLE = TrainingExample(tuple(range(10, 24)), (Span(3, 11),), False)


def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[TrainingBatch]:
    """The batches whose losses were computed."""
    seen: list[TrainingBatch] = []

    def losses(stack: Any, batch: TrainingBatch) -> TokenLosses:
        seen.append(batch)
        return TokenLosses(torch.ones(batch.clean.shape), torch.ones(len(batch.encoder_targets)))

    monkeypatch.setattr(held_out, "token_losses", losses)
    stack: Any = SimpleNamespace(norm=SimpleNamespace(weight=torch.zeros(1)))
    stream: Any = SimpleNamespace(take=lambda first, count: [EXAMPLE] * count)
    report = evaluate_held_out(stack, stream, SETTINGS, step=3, num_examples=5, batch_len=2)
    assert (report.step, report.examples, report.diffusion, report.encoder) == (3, 5, 1.0, 1.0)
    return seen


def test_an_example_that_is_also_trained_on_gets_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.cat([batch.noise for batch in evaluated(monkeypatch)])
    training = make_batch([EXAMPLE] * 5, range(5), SETTINGS).noise
    assert found.shape == training.shape
    assert not (found == training).any()


def test_every_look_has_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = evaluated(monkeypatch), evaluated(monkeypatch)
    assert [len(batch.clean) for batch in first] == [2, 2, 1]
    assert all(torch.equal(a.noisy, b.noisy) for a, b in zip(first, second, strict=True))
