"""A row does not feel its company: within rounding by default, to the bit in the exact way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from oracle import CASES, Case, make_oracle, make_ours, tokens
from sizes import cases

# Large enough that kernels really differ with the row count.
WIDE = Case(
    "wide",
    {"hidden_size": 256, "intermediate_size": 320, "head_dim": 32, "global_head_dim": 64,
     "moe_intermediate_size": 96, "num_experts": 16, "top_k_experts": 4, "vocab_size": 500,
     "num_attention_heads": 8, "sliding_window": 40},
    canvas_len=64,
    seed=21,
)  # fmt: skip
PROMPTS = [70, 5, 129, 64, 1, 90, 33, 200]


def life(lm: LanguageModel, rows: list[int], *, cuts: int = 1) -> list[Tensor]:
    """Prompt, two steps, commit, one step, for the chosen rows together; per row what came out."""
    prompts = [tokens(WIDE, 1, PROMPTS[row], seed=row)[0] for row in rows]
    canvas = torch.cat([tokens(WIDE, 1, WIDE.canvas_len, seed=50 + row) for row in rows])
    cache = lm.new_cache(batch=len(rows))
    hidden = [torch.empty(0)] * len(rows)
    for cut in range(cuts):
        parts = [p[len(p) * cut // cuts : len(p) * (cut + 1) // cuts] for p in prompts]
        lengths = [len(part) for part in parts]
        padded = torch.zeros(len(rows), max(*lengths, 1), dtype=torch.long)
        for row, part in enumerate(parts):
            padded[row, : len(part)] = part
        encoded = lm.encode(padded, cache, lengths=lengths)
        for row, length in enumerate(lengths):
            hidden[row] = torch.cat((hidden[row].to(encoded.dtype).view(-1), encoded[row, :length].view(-1)))
    logits = lm.logits(lm.denoise(canvas, cache))
    soft = lm.soft_embedding(logits)
    second = lm.denoise(canvas, cache, soft)
    lm.encode(logits.argmax(-1), cache)
    third = lm.denoise(canvas, cache)
    return [
        torch.cat([t.float().view(-1) for t in (hidden[i], logits[i], soft[i], second[i], third[i])])
        for i in range(len(rows))
    ]


@pytest.fixture(scope="module")
def wide_oracle() -> object:
    return make_oracle(WIDE)


@torch.no_grad()
def test_rows_are_independent_within_rounding_in_fp32(wide_oracle: object) -> None:
    """One step, before argmax choices can amplify the last bit."""
    lm = make_ours(wide_oracle)
    rows = list(range(8))
    canvas = torch.cat([tokens(WIDE, 1, WIDE.canvas_len, seed=50 + row) for row in rows])
    padded = torch.zeros(8, max(PROMPTS), dtype=torch.long)
    for row in rows:
        padded[row, : PROMPTS[row]] = tokens(WIDE, 1, PROMPTS[row], seed=row)[0]
    together = lm.new_cache(batch=8)
    encoded = lm.encode(padded, together, lengths=PROMPTS)
    denoised = lm.denoise(canvas, together)
    for row in rows:
        alone = lm.new_cache()
        encoded_alone = lm.encode(padded[row : row + 1, : PROMPTS[row]], alone)
        denoised_alone = lm.denoise(canvas[row : row + 1], alone)
        assert (encoded[row, : PROMPTS[row]] - encoded_alone[0]).abs().max() <= 1e-5
        # A product of eight rows adds in another order than one of a single row.
        assert (denoised[row] - denoised_alone[0]).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][: cases(2, 1)], ids=str)
@torch.no_grad()
def test_the_exact_way_gives_a_row_the_same_bits_alone_and_among_seven_others(
    wide_oracle: object, dtype: torch.dtype
) -> None:
    lm = make_ours(wide_oracle, dtype=dtype, execution=Execution(exact=True))
    together = life(lm, list(range(8)))
    shuffled = life(lm, [3, 6, 0, 7])
    for row in range(8):
        assert torch.equal(together[row], life(lm, [row])[0]), row
    for place, row in enumerate([3, 6, 0, 7]):
        assert torch.equal(shuffled[place], together[row]), row


@torch.no_grad()
def test_the_exact_way_does_not_feel_how_a_prompt_was_cut(wide_oracle: object) -> None:
    lm = make_ours(wide_oracle, dtype=torch.bfloat16, execution=Execution(exact=True))
    whole = life(lm, [0, 2, 7])
    for cuts in (2, 3, 5):
        for row, cut in enumerate(life(lm, [0, 2, 7], cuts=cuts)):
            assert torch.equal(whole[row], cut), (cuts, row)


@torch.no_grad()
def test_the_plain_way_is_not_bit_exact_so_the_exact_one_earns_its_cost(wide_oracle: object) -> None:
    lm = make_ours(wide_oracle, dtype=torch.bfloat16)
    together = life(lm, list(range(8)))
    assert any(not torch.equal(together[row], life(lm, [row])[0]) for row in range(8))


@torch.no_grad()
def test_exact_copy_shares_weights_and_agrees_with_the_plain_way() -> None:
    lm = make_ours(make_oracle(CASES[0]))
    twin = lm.exact()
    assert next(twin.transformer.parameters()) is next(lm.transformer.parameters())
    canvas = tokens(CASES[0], 2, 8, seed=1)
    plain_cache, exact_cache = lm.new_cache(2), twin.new_cache(2)
    prompt = tokens(CASES[0], 2, 30, seed=2)
    torch.testing.assert_close(
        lm.encode(prompt, plain_cache), twin.encode(prompt, exact_cache), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        lm.denoise(canvas, plain_cache), twin.denoise(canvas, exact_cache), atol=1e-5, rtol=0
    )
    assert not lm.transformer.execution.exact


@torch.no_grad()
def test_a_row_without_context_beside_a_long_one_stays_finite_and_right() -> None:
    """Whole key blocks of the short row are masked, which naive softmax turns into NaN."""
    case = CASES[3]
    lm = make_ours(make_oracle(case))
    prompt, canvas = tokens(case, 2, 1500, seed=1), tokens(case, 2, 8, seed=2)
    cache = lm.new_cache(2)
    encoded = lm.encode(prompt, cache, lengths=[1500, 0])
    assert cache.lengths == (1500, 0)
    assert encoded.isfinite().all()
    assert (encoded[1] == 0).all()
    alone = lm.new_cache()
    torch.testing.assert_close(
        lm.denoise(canvas, cache)[1:], lm.denoise(canvas[1:], alone), atol=1e-5, rtol=0
    )
