"""In bf16 we err no more than the reference does, on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from oracle import CASES, Case, encoder_logits, make_oracle, make_ours, oracle_cache, tokens
from sizes import cases

CASES_IN_BF16 = [CASES[0], CASES[2], CASES[3], CASES[5], CASES[7], CASES[9]]
WAYS = {
    "plain": Execution(),
    "by expert": Execution(grouped_experts=False),
    "exact": Execution(exact=True, encode_block=8, expert_tile=8),
}


def oracle_logits(oracle: DiffusionGemmaForBlockDiffusion, case: Case, seed: int) -> list[Tensor]:
    prompt, canvas = tokens(case, 1, 40, seed), tokens(case, 1, case.canvas_len, seed + 100)
    past = oracle_cache(oracle)
    first = oracle(input_ids=prompt, decoder_input_ids=canvas, past_key_values=past)
    second = oracle(
        decoder_input_ids=canvas,
        past_key_values=past,
        self_conditioning_logits=first.logits.to(oracle.dtype),  # as its generate does
    )
    encoded = encoder_logits(oracle, first.encoder_last_hidden_state)
    return [encoded, first.logits, second.logits]


def our_logits(lm: LanguageModel, case: Case, seed: int) -> list[Tensor]:
    prompt, canvas = tokens(case, 1, 40, seed), tokens(case, 1, case.canvas_len, seed + 100)
    cache = lm.new_cache()
    encoded = lm.logits(lm.encode(prompt, cache))
    first = lm.logits(lm.denoise(canvas, cache))
    second = lm.logits(lm.denoise(canvas, cache, lm.soft_embedding(first)))
    return [encoded, first, second]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, int, list[Tensor], list[Tensor]]]:
    """-> (case, seed, logits in fp32, logits in bf16) per geometry and seed; computed once for all ways."""
    found = []
    with torch.no_grad():
        for case in CASES_IN_BF16:
            path = tmp_path_factory.mktemp("oracle")
            wide = make_oracle(case)
            wide.save_pretrained(path)
            # .bfloat16() would round the rotary frequencies too.
            narrow = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.bfloat16).eval()
            found += [
                (case, seed, oracle_logits(wide, case, seed), oracle_logits(narrow, case, seed))
                for seed in range(10)
            ]
    return found


@pytest.mark.parametrize("way", list(WAYS)[: cases(len(WAYS), 1)])
@torch.no_grad()
def test_our_bf16_error_is_no_larger_than_the_oracles(oracles: list[Any], way: str) -> None:
    ours, theirs = torch.zeros(3), torch.zeros(3)
    models = {
        case: make_ours(make_oracle(case), dtype=torch.bfloat16, execution=WAYS[way])
        for case in CASES_IN_BF16
    }
    for case, seed, truth, narrow in oracles:
        for sums, found in ((ours, our_logits(models[case], case, seed)), (theirs, narrow)):
            sums += torch.stack([(a - b).pow(2).mean() for a, b in zip(found, truth, strict=True)])
    ratios = (ours / theirs).sqrt()
    print(f"{way}: our bf16 error / the oracle's = {[round(r, 3) for r in ratios.tolist()]}")
    assert theirs.min() > 0
    assert ratios.max() <= 1.1, ratios
