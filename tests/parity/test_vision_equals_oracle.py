"""Soft tokens of the vision tower equal the reference's in fp32."""

from __future__ import annotations

import pytest
import torch

from comparison import worst
from dgemma.language_model import LanguageModel
from oracle import make_ours
from vision_oracle import VISION_CASES, VisionCase, as_oracle_reads, patches_of_grid, vision_oracle

TOLERANCE = 1e-4


@torch.no_grad()
def soft_tokens(ours: LanguageModel, case: VisionCase, seed: int = 0) -> torch.Tensor:
    tower = ours.transformer.vision
    assert tower is not None
    found = []
    for number, (rows, columns) in enumerate(case.grids):
        patches = patches_of_grid(case, rows, columns, seed + number)
        found.append(tower(torch.from_numpy(patches.values()), rows, columns))
    return torch.cat(found)


@torch.no_grad()
def oracle_soft_tokens(oracle: object, case: VisionCase, seed: int = 0) -> torch.Tensor:
    images = [
        patches_of_grid(case, rows, columns, seed + number)
        for number, (rows, columns) in enumerate(case.grids)
    ]
    encoder = oracle.model.encoder
    return encoder.get_image_features(**as_oracle_reads(images, case.settings)).pooler_output


@pytest.mark.parametrize("case", VISION_CASES, ids=lambda case: case.name)
def test_soft_tokens_equal_the_oracles(case: VisionCase) -> None:
    """The oracle pads its images to one length and computes them together; ours are alone."""
    oracle = vision_oracle(case)
    ours = make_ours(oracle)
    found, wanted = soft_tokens(ours, case), oracle_soft_tokens(oracle, case)
    print(f"{case.name}: {worst(found, wanted):.1e} of {wanted.std():.2f}")
    assert wanted.std() > 0.3
    assert worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("case", VISION_CASES, ids=lambda case: case.name)
def test_each_tensor_of_the_tower_matters(case: VisionCase) -> None:
    """A tensor that could be forgotten without a trace would not be guarded."""
    oracle = vision_oracle(case)
    wanted = oracle_soft_tokens(oracle, case)
    ours = make_ours(oracle)
    tower = ours.transformer.vision
    assert tower is not None
    for name, tensor in [*tower.named_parameters(), *tower.named_buffers()]:
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(kept.flatten().roll(1).view(kept.shape) if kept.ndim else kept / 2)
            assert worst(soft_tokens(ours, case), wanted) > 10 * TOLERANCE, name
            tensor.copy_(kept)
    assert worst(soft_tokens(ours, case), wanted) <= TOLERANCE
