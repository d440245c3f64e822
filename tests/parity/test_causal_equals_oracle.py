"""Left-to-right decoding through the causal door equals the oracle's encoder with its head."""

from __future__ import annotations

import pytest
import torch

from oracle import CASES, Case, encoder_logits, make_ours, new_oracle, oracle_cache, tokens
from sizes import cases

NUM_TOKENS = cases(full=500, part=200)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
@torch.no_grad()
def test_greedy_tokens_are_the_oracles(case: Case) -> None:
    oracle = new_oracle(case)
    signs = torch.randint(2, (32,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    # Tied random weights repeat the word they read; turned signs before the head make them go on.
    for name, tensor in oracle.named_parameters():
        if name.endswith("language_model.norm.weight"):
            tensor *= signs
    prompt = tokens(case, 1, 7, seed=4)
    past = oracle_cache(oracle)
    wanted: list[int] = []
    margins: list[float] = []
    given = prompt
    for _ in range(NUM_TOKENS):
        hidden = oracle.model.encoder(input_ids=given, past_key_values=past).last_hidden_state
        logits = encoder_logits(oracle, hidden[:, -1:])[0, 0]
        best = logits.topk(2).values
        margins.append(float(best[0] - best[1]))
        wanted.append(int(logits.argmax()))
        given = torch.tensor([[wanted[-1]]])
    answer = make_ours(oracle).generate(
        prompt[0].tolist(), decode="causal", temperature=0, max_tokens=NUM_TOKENS, ignore_end=True
    )
    print(f"{len(set(wanted))} different words, smallest margin {min(margins):.1e}")
    assert len(set(wanted)) > 10
    assert list(answer.tokens) == wanted
