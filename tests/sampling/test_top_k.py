"""The running top-k equals a sort of the whole vocabulary; floors keep exactly what top-k and top-p say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgemma.sampling.top_k import RunningTopK, TopK, truncation_floor

# Probabilities 1/2, 1/4, 1/8 and less: sums of the first are exact.
LOGITS = torch.tensor([[[0.0, -1.0, -2.0, -2.5]]]) * 0.6931472


def floor_of(top_k: int | None, top_p: float | None) -> Tensor:
    """Of two rows of three positions that are alike."""
    logits = LOGITS.expand(2, 3, -1)
    tokens = torch.arange(logits.shape[-1]).expand_as(logits)
    log_mass = torch.full(logits.shape[:-1], 0.6931472)
    return truncation_floor(TopK(tokens, logits), log_mass, top_k, top_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "last"),
    [
        (1, None, 0),
        (3, None, 2),
        (9, None, 3),
        (None, 0.4, 0),
        (None, 0.5, 0),  # the first token reaches 0.5: the second does not stay
        (None, 0.51, 1),
        (None, 0.75, 1),
        (None, 0.8, 2),
        (None, 1e-30, 0),
        (None, 0.0, 0),  # what fp32 makes of a smaller number
        (2, 0.8, 1),
        (3, 0.5, 0),
    ],
)
def test_the_floor_is_the_logit_of_the_last_token_that_stays(
    top_k: int | None, top_p: float | None, last: int
) -> None:
    shares = (LOGITS[0, 0] - 0.6931472).exp()
    assert shares[:2].tolist() == [0.5, 0.25], "the borders are exact"
    assert torch.equal(floor_of(top_k, top_p), LOGITS[..., last].expand(2, 3))


def top_k_of(scaled: Tensor, count: int, block: int, borders: tuple[int, ...]) -> TopK:
    """Of parts of the vocabulary that end at `borders`, each read in blocks."""
    parts = []
    for first, end in zip((0, *borders), (*borders, scaled.shape[-1]), strict=True):
        parts.append(RunningTopK(count))
        for begin in range(first, end, block):
            tokens = slice(begin, min(begin + block, end))
            parts[-1].add(scaled[..., tokens], tokens)
    return RunningTopK.join(parts)


@pytest.mark.parametrize("count", [1, 3, 7, 40])
@pytest.mark.parametrize("block", [1, 5, 16, 64])
@pytest.mark.parametrize("borders", [(), (16,), (7, 21)])
def test_a_running_top_k_is_that_of_the_whole(count: int, block: int, borders: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(count)
    scaled = torch.stack([torch.randperm(37, generator=generator) for _ in range(6)]).view(2, 3, 37).float()
    expected = scaled.sort(dim=-1, descending=True)
    found = top_k_of(scaled, count, block, borders)
    assert torch.equal(found.logits, expected.values[..., :count])
    assert torch.equal(found.tokens, expected.indices[..., :count])


@pytest.mark.parametrize("borders", [(), (4,)])
def test_of_equal_logits_in_different_blocks_the_smaller_token_comes_first(borders: tuple[int, ...]) -> None:
    found = top_k_of(torch.zeros(1, 1, 9), 5, 1, borders)
    assert found.tokens.tolist() == [[[0, 1, 2, 3, 4]]]
