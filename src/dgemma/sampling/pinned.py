"""Pinned positions: a fixed token is a point mass, a set of allowed tokens narrows the distribution."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.sampling.rng import NoiseKey
from dgemma.sampling.top_k import TopK
from dgemma.sampling.vocab_scan import VocabHead, VocabScan, scaled_logits, scan_dense

# Shapes: rows = canvases, canvas = positions, listed = some positions of one canvas.

# Elements of [listed, vocabulary] held at once.
_MAX_LOGITS = 16 << 20


@dataclass(frozen=True)
class AllowedTokens:
    """Positions of one canvas, each with the tokens that are allowed there."""

    positions: Tensor  # [listed]
    tokens: tuple[Tensor, ...]  # of each position, ascending

    def mask(self, part: slice, vocab_size: int) -> Tensor:
        """True where a token is allowed [listed, vocabulary]."""
        some = self.tokens[part]
        mask = torch.zeros(len(some), vocab_size, dtype=torch.bool, device=self.positions.device)
        for row, tokens in zip(mask, some, strict=True):
            row[tokens] = True
        return mask


@dataclass(frozen=True)
class CanvasPins:
    """What is pinned on one canvas."""

    tokens: Tensor  # [canvas]: the pinned token, or the one the first step starts from
    begins: Tensor  # [canvas]: True where `tokens` replace the noise of the first step
    free: Tensor  # [canvas]: False where the token is fixed
    allowed: AllowedTokens | None = None
    watched: AllowedTokens | None = None
    # Positions that a scan of the vocabulary tells nothing about: fixed, or with a distribution of their own.
    known: frozenset[int] = frozenset()

    def open(self, noise: Tensor) -> Tensor:
        """The canvas before its first step, from noise [canvas]."""
        return torch.where(self.begins, self.tokens, noise)


def apply_pins(scan: VocabScan, tokens: Tensor, free: Tensor, embeddings: Tensor) -> VocabScan:
    """`scan` with a point mass on `tokens` [rows, canvas] wherever a position is not free.

    embeddings [rows, canvas, hidden]: input embeddings of the tokens, scaled; the soft embedding there.
    """

    def settled(values: Tensor, value: Tensor | float) -> Tensor:
        return torch.where(free, values, value)

    top_k = scan.top_k
    if top_k is not None:
        point = torch.full_like(top_k.logits, float("-inf"))
        point[..., 0] = 0.0
        top_k = TopK(
            torch.where(free[..., None], top_k.tokens, tokens[..., None]),
            torch.where(free[..., None], top_k.logits, point),
        )
    soft = scan.soft
    if soft is not None:
        soft = torch.where(free[..., None], soft, embeddings.to(soft.dtype))
    return replace(
        scan,
        argmax=settled(scan.argmax, tokens),
        sampled=settled(scan.sampled, tokens),
        entropy=settled(scan.entropy, 0.0),
        log_mass=settled(scan.log_mass, 0.0),
        top_logit=settled(scan.top_logit, 0.0),
        soft=soft,
        top_k=top_k,
        sampled_logit=None if scan.sampled_logit is None else settled(scan.sampled_logit, 0.0),
    )


def apply_allowed_tokens(
    scan: VocabScan,
    row: int,
    hidden: Tensor,
    head: VocabHead,
    temperature: Tensor,
    key: NoiseKey | None,
    allowed: AllowedTokens,
    bias: Tensor | None = None,
) -> VocabScan:
    """`scan` with row `row` restricted to the allowed tokens at the listed positions.

    hidden [canvas, hidden], temperature and bias [1, vocabulary] belong to that row. The logits of these
    positions are materialized, some at a time. top-k and top-p truncation do not apply here.
    """
    changed = {f.name: getattr(scan, f.name) for f in fields(VocabScan)}
    for name, value in changed.items():
        if isinstance(value, Tensor):
            changed[name] = value.clone()
        elif isinstance(value, TopK):
            changed[name] = TopK(value.tokens.clone(), value.logits.clone())
    size = max(1, _MAX_LOGITS // head.vocab_size)
    for begin in range(0, len(allowed.tokens), size):
        part = slice(begin, begin + size)
        positions = allowed.positions[part]
        products = head.products(hidden[None, positions], slice(0, head.vocab_size))
        scaled = scaled_logits(products, head.logit_cap, temperature)
        scaled = scaled if bias is None else scaled + bias[:, None]
        scaled = torch.where(allowed.mask(part, head.vocab_size), scaled, float("-inf"))
        own = None if key is None else key.row(row)
        _overwrite(changed, row, positions, scaled, scan_dense(scaled, own, positions), head)
    return VocabScan(**changed)


def _overwrite(
    changed: dict[str, Any],
    row: int,
    positions: Tensor,
    scaled: Tensor,
    found: VocabScan,
    head: VocabHead,
) -> None:
    for name in ("argmax", "sampled", "entropy", "log_mass", "top_logit", "sampled_logit"):
        if changed[name] is not None:
            changed[name][row, positions] = getattr(found, name)[0]
    soft, top_k = changed["soft"], changed["top_k"]
    if soft is not None:
        mixed = head.mix(scaled.softmax(-1), slice(0, head.vocab_size))
        soft[row, positions] = (mixed[0].float() * head.embedding_scale).to(soft.dtype)
    if top_k is not None:
        top = scaled[0].topk(top_k.tokens.shape[-1])
        top_k.tokens[row, positions] = top.indices
        top_k.logits[row, positions] = top.values


def watched_log_probs(
    hidden: Tensor, head: VocabHead, watched: AllowedTokens, allowed: AllowedTokens | None
) -> list[Tensor]:
    """Log-probabilities at temperature 1 of each listed position's tokens, among the allowed ones if
    restricted.

    hidden [canvas, hidden] -> per listed position [tokens].
    """
    limits: dict[int, Tensor] = {}
    if allowed is not None:
        limits = dict(zip(allowed.positions.tolist(), allowed.tokens, strict=True))
    found: list[Tensor] = []
    size = max(1, _MAX_LOGITS // head.vocab_size)
    one = torch.ones(1, device=hidden.device)
    for begin in range(0, len(watched.tokens), size):
        part = slice(begin, begin + size)
        positions = watched.positions[part]
        products = head.products(hidden[None, positions], slice(0, head.vocab_size))
        logits = scaled_logits(products, head.logit_cap, one)[0]
        for position, tokens, own in zip(positions.tolist(), watched.tokens[part], logits, strict=True):
            allowed_here = limits.get(position)
            mass = (own if allowed_here is None else own[allowed_here]).logsumexp(-1)
            inside = (
                torch.ones_like(tokens, dtype=torch.bool)
                if allowed_here is None
                else torch.isin(tokens, allowed_here)
            )
            found.append(torch.where(inside, own[tokens] - mass, float("-inf")))
    return found
