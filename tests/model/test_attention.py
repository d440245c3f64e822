"""Attention in both forms is the same, and an image belongs to the blocks that hold its tokens."""

from __future__ import annotations

import pytest
import torch

from dgemma.model.attention import RowSpan, explicit_attention, grouped_query_attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_explicit_attention_agrees_with_the_fused_one_in_value_and_gradient(
    kv_heads: int, wide: bool
) -> None:
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 5 if wide else 1, 9) < 0.5
    mask[..., 0] = True
    found = []
    for how in (grouped_query_attention, explicit_attention):
        torch.manual_seed(1)
        tensors = [torch.randn(2, 5, 4, 8), *(torch.randn(2, 9, kv_heads, 8) for _ in range(2))]
        for tensor in tensors:
            tensor.requires_grad_(True)
        for seen in (mask, None):
            mixed = how(*tensors, seen)
            mixed.sin().sum().backward()
        found.append([mixed.detach(), *(t.grad for t in tensors)])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_a_block_has_the_images_with_tokens_in_it() -> None:
    span = RowSpan(length=0, first=0, stop=60, images=((10, 20), (20, 45)))
    found = {
        block: span.images_in(*block) for block in [(0, 10), (0, 11), (10, 20), (19, 21), (20, 30), (45, 60)]
    }
    assert found == {
        (0, 10): [],
        (0, 11): [(10, 20)],
        (10, 20): [(10, 20)],
        (19, 21): [(10, 20), (20, 45)],
        (20, 30): [(20, 45)],
        (45, 60): [],
    }
