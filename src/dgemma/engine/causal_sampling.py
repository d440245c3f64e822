"""Sampling left to right: the next token, the check of a canvas as a draft, the score of a text.

All three work on hidden states of the causal pass. A token's noise depends on the seed and on its index in
the answer alone: that is why a checked draft is the text that causal decoding would have written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.engine.model_runner import log_probs, logit_bias, scan_tokens, split_rows, stack_rows
from dgemma.engine.sequence import Encoded, SampleOutput, SequenceState
from dgemma.events import ScoredToken
from dgemma.model.transformer import Transformer
from dgemma.sampling.rng import noise_key
from dgemma.sampling.top_k import TopK
from dgemma.sampling.vocab_scan import VocabScan

# The step index of a causal sample in its random counter: no canvas takes so many steps.
CAUSAL_STEP = (1 << 32) - 1

# Positions whose logits are held at once when a text is scored, or a draft verified.
_SCORE_BLOCK = 64
_VERIFY_BLOCK = 64


@dataclass(frozen=True)
class NextToken:
    """A token to be sampled left to right."""

    sequence: SequenceState
    index: int  # in the answer: its noise depends on it alone
    state: int  # of the constraint's DFA before it


def sample_tokens(
    model: Transformer, sequences: Sequence[SequenceState], hidden: Tensor
) -> list[SampleOutput]:
    """The next token of causal sequences, from `hidden` [rows, 1, hidden]."""
    wanted = [NextToken(sequence, len(sequence.output.tokens), _state(sequence)) for sequence in sequences]
    scan = _scan_tokens(model, wanted, hidden)
    top_k = split_rows(log_probs(scan), len(sequences))
    return [SampleOutput(*row, settled=True) for row in zip(scan.sampled, scan.entropy, top_k, strict=True)]


def verify_drafts(
    model: Transformer, sequences: Sequence[SequenceState], hidden: Sequence[Tensor]
) -> list[SampleOutput]:
    """The next tokens of sequences with a draft, from `hidden` [1 + draft, hidden] of each: of the context's
    last token, and of the draft.

    Each position gets the token that causal decoding would sample there, with the same noise. The draft is
    accepted while its tokens are these tokens; the first one that is not is replaced, and ends the output. A
    draft that is accepted as a whole is followed by one more token. So the output is the causal one, whatever
    the draft. "verified" also accepts a token that is likely enough to the causal pass.
    """
    wanted = [_wanted_tokens(sequence) for sequence in sequences]
    flat = [token for tokens in wanted for token in tokens]
    states = torch.cat([own[: len(tokens)] for own, tokens in zip(hidden, wanted, strict=True)])
    found: list[SampleOutput] = []
    scan = _scan_blocks(model, flat, states)
    top_k = log_probs(scan)
    sampled, begin = scan.sampled[:, 0].tolist(), 0
    for sequence, tokens, own in zip(sequences, wanted, hidden, strict=True):
        assert sequence.draft is not None
        likely = _are_likely(model, sequence, own)
        rows = slice(begin, begin + len(tokens))
        accepted = 0
        for draft, token, is_likely in zip(sequence.draft, sampled[rows], likely, strict=False):
            if token != draft and not is_likely:
                break
            accepted += 1
        # Of a draft that was cut short by max_tokens or by the language, nothing comes after it.
        count = min(accepted + 1, len(tokens))
        guess = [*sequence.draft[:accepted], *sampled[rows][accepted:]][:count]
        some = slice(begin, begin + count)
        found.append(
            SampleOutput(
                torch.tensor(guess),
                scan.entropy[some, 0],
                None if top_k is None else TopK(top_k.tokens[some, 0], top_k.logits[some, 0]),
                settled=True,
                accepted=min(accepted, count),
            )
        )
        begin += len(tokens)
    return found


def draft_tokens(model: Transformer, sequence: SequenceState, sample: SampleOutput, hidden: Tensor) -> Tensor:
    """The draft of a settled canvas, from `hidden` [canvas, hidden] of its last step.

    At a temperature above 0 it is sampled with the noise that the causal pass will use: two distributions
    that are alike then mostly give the same token, however flat they are.
    """
    if sequence.request.params.temperature == 0 or sequence.constraint_state is not None:
        return sample.guess
    begin = len(sequence.output.tokens)
    wanted = [NextToken(sequence, begin + at, 0) for at in range(len(hidden))]
    return _scan_blocks(model, wanted, hidden).sampled[:, 0]


def _wanted_tokens(sequence: SequenceState) -> list[NextToken]:
    """Those of a draft, and the one after it; as far as max_tokens and the constraint allow."""
    assert sequence.draft is not None
    begin = len(sequence.output.tokens)
    count = min(len(sequence.draft) + 1, sequence.output.max_tokens - begin)
    states = [0] * count
    if sequence.constraint_state is not None:
        states = sequence.constraint_state.states_along(begin, sequence.draft[: count - 1])
    return [NextToken(sequence, begin + at, state) for at, state in enumerate(states)]


def _are_likely(model: Transformer, sequence: SequenceState, hidden: Tensor) -> Sequence[bool]:
    """Whether "verified" accepts each token of the draft for its causal probability."""
    draft = sequence.draft or []
    if sequence.decode != "verified":
        return [False] * len(draft)
    least = math.log(max(sequence.request.params.verify_threshold, 1e-30))
    begin = len(sequence.context) - 1
    return [score >= least for score in score_tokens(model, hidden[: len(draft)], draft, begin)]


def _scan_blocks(model: Transformer, wanted: Sequence[NextToken], hidden: Tensor) -> VocabScan:
    """`_scan_tokens` of `hidden` [tokens, hidden], in blocks: the logits of a whole draft are large."""
    blocks = [slice(at, at + _VERIFY_BLOCK) for at in range(0, len(wanted), _VERIFY_BLOCK)]
    return stack_rows([_scan_tokens(model, wanted[block], hidden[block, None]) for block in blocks])


def _scan_tokens(model: Transformer, wanted: Sequence[NextToken], hidden: Tensor) -> VocabScan:
    """Sample a token for each row of `hidden` [rows, 1, hidden]."""
    sequences = [token.sequence for token in wanted]
    params, device = sequences[0].request.params, hidden.device
    heat = torch.tensor([sequence.request.params.temperature or 1.0 for sequence in sequences], device=device)
    key = None
    if params.temperature > 0:
        seeds, indices = [s.output.seed for s in sequences], [token.index for token in wanted]
        key = noise_key(seeds, indices, [CAUSAL_STEP] * len(wanted), device)
    bias = _only_allowed(model, wanted, logit_bias(model, sequences, device), device)
    return scan_tokens(model, hidden, heat, key, params, bias)


def _state(sequence: SequenceState) -> int:
    return 0 if sequence.constraint_state is None else sequence.constraint_state.state


def score_chunk(
    model: Transformer, sequence: SequenceState, encoded: Encoded, start: int, score_from: int
) -> None:
    """Score the token after each of a chunk of the prompt, which begins at `start`, from `score_from` on."""
    first, stop = max(start, score_from - 1), min(start + len(encoded.hidden), len(sequence.context) - 1)
    if first >= stop:
        return
    hidden, followers = encoded.hidden[first - start : stop - start], sequence.context[first + 1 : stop + 1]
    output, num_top = sequence.output, sequence.request.prompt_logprobs
    if num_top is None or output.prompt_logprobs is None:
        output.scores += score_tokens(model, hidden, followers, first)
    else:
        num_top = min(num_top, model.config.vocab_size)
        output.prompt_logprobs += scored_tokens(model, hidden, followers, first, num_top)


def score_tokens(model: Transformer, hidden: Tensor, followers: Sequence[int], begin: int) -> list[float]:
    """Log-probability of `followers`, the token after each of `hidden` [tokens, hidden], the first at
    `begin`."""
    found: list[float] = []
    for logits, target in _score_blocks(model, hidden, followers, begin):
        found += (logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
    return found


def scored_tokens(
    model: Transformer, hidden: Tensor, followers: Sequence[int], begin: int, num_top: int
) -> list[ScoredToken]:
    """`score_tokens`, with the rank of each token and the `num_top` most likely ones in its place."""
    found: list[ScoredToken] = []
    for logits, target in _score_blocks(model, hidden, followers, begin):
        own, mass = logits.gather(-1, target[:, None]), logits.logsumexp(-1, keepdim=True)
        top = logits.topk(num_top)
        lists = zip(top.indices.tolist(), (top.values - mass).tolist(), strict=True)
        found += [
            ScoredToken(token, value, rank, tuple(zip(tokens, values, strict=True)))
            for token, value, rank, (tokens, values) in zip(
                target.tolist(),
                (own - mass)[:, 0].tolist(),
                ((logits > own).sum(-1) + 1).tolist(),
                lists,
                strict=True,
            )
        ]
    return found


def _score_blocks(
    model: Transformer, hidden: Tensor, followers: Sequence[int], begin: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [some tokens, vocabulary] and the followers to be found in them [some tokens].

    In blocks at fixed positions, so that the bits do not depend on where a chunk begins.
    """
    done = 0
    while done < len(followers):
        at = (begin + done) % _SCORE_BLOCK
        count = min(_SCORE_BLOCK - at, len(followers) - done)
        padded = hidden.new_zeros(1, _SCORE_BLOCK, hidden.shape[1])
        padded[0, at : at + count] = hidden[done : done + count]
        target = torch.tensor(followers[done : done + count], device=hidden.device)
        yield model.head.logits(padded)[0, at : at + count], target
        done += count


def _only_allowed(
    model: Transformer, wanted: Sequence[NextToken], bias: Tensor | None, device: torch.device
) -> Tensor | None:
    """`bias` with -inf for every token that the constraint does not allow there."""
    if wanted[0].sequence.constraint_state is None:
        return bias
    bias = torch.zeros(len(wanted), model.config.vocab_size, device=device) if bias is None else bias
    for row, token in enumerate(wanted):
        constraint_state = token.sequence.constraint_state
        assert constraint_state is not None
        allowed = torch.from_numpy(constraint_state.allowed_tokens(token.index, token.state)).to(device)
        bias[row].masked_fill_(~allowed, float("-inf"))
    return bias
