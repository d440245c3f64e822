"""Unmasking one position at a time samples the joint distribution whose conditionals the model knows."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from chi_square import chi_square
from dgemma.sampling.rng import noise_key
from dgemma.sampling.sampler import Sampler, masked_sampler, open_canvas, step
from dgemma.sampling.vocab_scan import scan_dense

WORDS, LENGTH, MASK = 3, 3, 3
DRAWS = 4_000


def joint() -> Tensor:
    """Probability of each text [WORDS, WORDS, WORDS], far from independent."""
    logits = torch.randn((WORDS,) * LENGTH, generator=torch.Generator().manual_seed(5)) * 1.5
    return logits.flatten().softmax(0).view_as(logits).double()


def conditionals(canvases: Tensor, table: Tensor) -> Tensor:
    """Log-probability of each word at each position given what is unmasked [rows, LENGTH, WORDS + 1]."""
    texts = torch.tensor(list(product(range(WORDS), repeat=LENGTH)))
    fits = ((canvases[:, None] == MASK) | (canvases[:, None] == texts)).all(-1)  # [rows, texts]
    weights = fits * table.flatten()
    found = torch.full((*canvases.shape, WORDS + 1), float("-inf"), dtype=torch.float64)
    for position, word in product(range(LENGTH), range(WORDS)):
        found[:, position, word] = (weights * (texts[:, position] == word)).sum(-1).log()
    return (found - found.logsumexp(-1, keepdim=True)).float()


def sampled(sampler: Sampler, table: Tensor) -> Tensor:
    masks = torch.full((DRAWS, LENGTH), MASK)
    state = open_canvas(masks)
    for number in range(sampler.num_steps):
        key = noise_key(range(DRAWS), [0] * DRAWS, [number] * DRAWS, torch.device("cpu"))
        state = step(state, scan_dense(conditionals(state.canvas, table), key), masks, sampler)
    assert bool(state.settled.all())
    assert torch.equal(state.canvas, state.argmax)
    powers = torch.tensor([WORDS**2, WORDS, 1])
    return torch.bincount((state.canvas * powers).sum(-1), minlength=WORDS**LENGTH)


def test_left_to_right_one_at_a_time_is_the_joint_distribution() -> None:
    """Which position is next must not depend on what was sampled for it: here its number decides."""
    table = joint()
    counts = sampled(masked_sampler(num_steps=LENGTH, block_len=1), table)
    assert chi_square(counts, table.flatten() * DRAWS) < 4


def test_all_at_once_is_the_product_of_the_marginals_and_not_the_joint() -> None:
    table = joint()
    counts = sampled(masked_sampler(num_steps=1), table)
    a, b, c = table.sum((1, 2)), table.sum((0, 2)), table.sum((0, 1))
    marginals = a[:, None, None] * b[None, :, None] * c
    assert chi_square(counts, marginals.flatten() * DRAWS) < 4
    assert chi_square(counts, table.flatten() * DRAWS) > 40
