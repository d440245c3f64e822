"""One scan over the vocabulary in tiles: argmax, sample, entropy, top-k and soft embedding of every position.

The logits [canvas, vocabulary] are never held as a whole. For each fixed chunk of 1,024 tokens the scan keeps
the sum of exponentials and its entropy term, relative to the largest logit of the chunk's block; of the two
leading chunks (by largest logit, and in the exponential race) it keeps the head's products. The merge at the
end does not depend on the tile size, so neither does the sample. The soft embedding is summed block by block
under a running maximum, as in online softmax. Scans over parts of the vocabulary can be joined: that is a
sharded vocabulary.

`scan_dense` is the reference implementation, on dense logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.kernels.elementwise import Elementwise, kernels_for
from dgemma.sampling.rng import NoiseKey, NoiseStream, race_times
from dgemma.sampling.top_k import RunningTopK, TopK

# Shapes: rows = canvases, canvas = positions, vocab = all tokens, tokens = a tile or block of them,
# chunks = tokens / CHUNK.

# Tokens race inside canonical chunks of this many, chunks race with their masses. Every tile is a
# multiple of it, so that a sample does not depend on the tile size.
CHUNK = 1024
# A share below e^-80 of the block's largest counts as 0. Smaller ones would be denormal numbers, which slow
# the product with the embeddings down 18 times.
MIN_BELOW = -80.0


@dataclass(frozen=True)
class VocabScan:
    """Result of a scan under the scaled logits; all [rows, canvas] but `soft` and `top_k`."""

    argmax: Tensor  # the most likely token
    sampled: Tensor  # one token sampled from the distribution
    entropy: Tensor  # nats
    log_mass: Tensor  # log-sum-exp of the scaled logits
    top_logit: Tensor  # scaled logit of the argmax
    soft: Tensor | None = None  # mean embedding [rows, canvas, hidden], where the scan made it
    top_k: TopK | None = None  # on request
    sampled_logit: Tensor | None = None  # scaled logit of the sampled token; constrained scans have none


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """`logits` [rows, canvas, vocab] over a temperature per row [rows]. Zero: nearly infinite logits."""
    return logits / _clamped(temperature).view(-1, 1, 1).to(logits.dtype)


def _clamped(temperature: Tensor) -> Tensor:
    return temperature.clamp(min=torch.finfo(torch.float32).tiny ** 0.25)


def scaled_logits(products: Tensor, cap: float | None, temperature: Tensor) -> Tensor:
    """fp32 logits over temperature from the head's bare products, the soft-cap folded in."""
    if cap is None:
        return scale(products.float(), temperature)
    gain = scale(torch.full((1, 1, 1), cap, device=temperature.device), temperature)
    return torch.tanh(products.float() / cap) * gain


def scan_dense(scaled: Tensor, key: NoiseKey | None, positions: Tensor | None = None) -> VocabScan:
    """Reference implementation: holds [rows, canvas, vocab]. Without a key, `sampled` is the argmax.

    positions: which ones of the canvas these are; None: all, from the first.
    """
    log_mass = scaled.logsumexp(-1)
    normed = scaled - log_mass[..., None]
    lowest = torch.finfo(normed.dtype).min
    entropy = -(normed.clamp(min=lowest) * normed.softmax(-1)).sum(-1)
    top_logit, _ = scaled.max(-1)
    argmax = scaled.argmax(-1)
    sampled = argmax if key is None else sample_dense(scaled, key, positions)
    sampled_logit = scaled.gather(-1, sampled[..., None])[..., 0]
    return VocabScan(argmax, sampled, entropy, log_mass, top_logit, sampled_logit=sampled_logit)


def sample_dense(scaled: Tensor, key: NoiseKey, positions: Tensor | None = None) -> Tensor:
    """A two-level exponential race: the chunk that finishes first, then its first token."""
    vocab = scaled.shape[-1]
    padded = torch.nn.functional.pad(scaled, (0, -vocab % CHUNK), value=float("-inf"))
    chunks = padded.unflatten(-1, (-1, CHUNK))  # [rows, canvas, chunks, CHUNK]
    numbers = torch.arange(chunks.shape[-2], device=scaled.device).expand(chunks.shape[:3])
    finish = race_times(key, NoiseStream.CHUNK_RACE, numbers, positions) - chunks.logsumexp(-1)
    winner = finish.argmin(-1)
    index = winner[..., None, None].expand(*winner.shape, 1, CHUNK)
    return race_in_chunk(chunks.gather(-2, index).squeeze(-2), winner, key, positions)


def race_in_chunk(scaled: Tensor, chunk: Tensor, key: NoiseKey, positions: Tensor | None = None) -> Tensor:
    """The token that wins inside `chunk` [rows, canvas]; its logits are [rows, canvas, up to CHUNK]."""
    tokens = chunk[..., None] * CHUNK + torch.arange(scaled.shape[-1], device=scaled.device)
    finish = race_times(key, NoiseStream.TOKEN_RACE, tokens, positions) - scaled
    return chunk * CHUNK + finish.argmin(-1)


BLOCK = 2 * CHUNK
"""Tokens whose numbers are held relative to one maximum, and whose embeddings are mixed in one product."""
SPLIT = 4 * CHUNK
"""A part of the vocabulary begins at a multiple of this: four chunks share one draw of random numbers."""


class Terms(NamedTuple):
    """How products become logits."""

    temperature: Tensor  # [rows]
    cap: float | None
    bias: Tensor | None  # [rows, tokens], added to the scaled logits; -inf forbids
    floor: Tensor | None  # [rows, canvas]: tokens below it are forbidden


class Lead(NamedTuple):
    """The leading chunk so far, and its products: its tokens are compared at the end of the scan."""

    score: Tensor  # [rows, canvas], smaller leads
    chunk: Tensor  # [rows, canvas], its index
    products: Tensor  # [rows, canvas, CHUNK], fewer where the whole vocabulary has fewer


class Block(NamedTuple):
    """A block's numbers, relative to its largest logit."""

    top: Tensor  # [rows, canvas]
    mass: Tensor  # [rows, canvas, chunks], sum of exp(logit - top)
    moment: Tensor  # [rows, canvas, chunks], sum of exp(logit - top) * (logit - top)
    shares: Tensor  # [rows, canvas, tokens], exp(logit - top) in the model's dtype


def no_lead(products: Tensor) -> Lead:
    positions = products.shape[:2]
    return Lead(
        torch.full(positions, float("inf"), device=products.device),
        torch.zeros(positions, dtype=torch.int64, device=products.device),
        products.new_zeros(*positions, min(CHUNK, products.shape[-1])),
    )


def logits_of(products: Tensor, terms: Terms) -> Tensor:
    """Scaled logits [rows, canvas, tokens], -inf where a token is forbidden."""
    scaled = scaled_logits(products, terms.cap, terms.temperature)
    if terms.bias is not None:
        scaled = scaled + terms.bias[:, None]
    if terms.floor is not None:
        scaled = torch.where(scaled < terms.floor[..., None], float("-inf"), scaled)
    return scaled


def scan_block(
    products: Tensor,
    terms: Terms,
    first_chunk: Tensor,
    races: Tensor | None,
    best: Lead,
    race_winner: Lead,
) -> tuple[Block, Lead, Lead]:
    """Read a block of `products` [rows, canvas, tokens]; update the leaders by logit and in the race.

    `races` [rows, canvas, chunks]: log of each chunk's unit exponential; None where nothing is sampled.
    """
    tokens = products.shape[-1]
    width = best.products.shape[-1]
    missing = -tokens % width
    scaled = F.pad(logits_of(products, terms), (0, missing), value=float("-inf"))
    chunks = scaled.unflatten(-1, (-1, width))
    tops = chunks.amax(-1)
    top = tops.amax(-1)
    # A block of forbidden tokens has no finite top; measured from zero its shares are all zero.
    below = chunks - torch.where(top.isfinite(), top, 0.0)[..., None, None]
    shares = torch.where(below > MIN_BELOW, below.exp(), 0.0)
    if missing or terms.bias is not None or terms.floor is not None:
        below = below.clamp(min=-1e4)  # a forbidden token's zero share times its -inf must be zero
    mass = shares.sum(-1)
    moment = (shares * below).sum(-1)
    raw = F.pad(products, (0, missing)).unflatten(-1, (-1, width))
    best = _update_lead(best, -tops, raw, first_chunk)
    if races is not None:
        race_winner = _update_lead(race_winner, races - (top[..., None] + mass.log()), raw, first_chunk)
    block = Block(top, mass, moment, shares.flatten(-2)[..., :tokens].to(products.dtype))
    return block, best, race_winner


def _update_lead(lead: Lead, scores: Tensor, chunks: Tensor, first_chunk: Tensor) -> Lead:
    score, chunk = scores.min(-1)
    index = chunk[..., None, None].expand(*chunk.shape, 1, chunks.shape[-1])
    leads = score < lead.score
    return Lead(
        torch.where(leads, score, lead.score),
        torch.where(leads, chunk + first_chunk, lead.chunk),
        torch.where(leads[..., None], chunks.gather(-2, index).squeeze(-2), lead.products),
    )


def scan_block_native(
    kernels: Elementwise,
    products: Tensor,
    terms: Terms,
    first_chunk: int,
    races: Tensor | None,
    best: Lead,
    race_winner: Lead,
) -> Block:
    """The same in one pass on a CPU; updates the leaders in place."""
    assert terms.floor is None
    temperature = _clamped(terms.temperature).float().contiguous()
    return Block(
        *kernels.scan_block(
            products, temperature, terms.cap, terms.bias, first_chunk, races, best, race_winner
        )
    )


ScanBlock = Callable[..., tuple[Block, Lead, Lead]]
Accumulate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class VocabHead(Protocol):
    """The part of a model's head that the scan calls."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap * tanh(products / cap); None: they are the products."""
        ...

    @property
    def embedding_scale(self) -> float:
        """What an embedding is multiplied by where it is an input."""
        ...

    def products(self, hidden: Tensor, tokens: slice) -> Tensor:
        """Bare products [rows, canvas, tokens] of a range of tokens."""
        ...

    def mix(self, shares: Tensor, tokens: slice) -> Tensor:
        """Their embeddings weighed by `shares` [rows, canvas, tokens] -> [rows, canvas, hidden]."""
        ...


@dataclass(frozen=True, kw_only=True)
class VocabSplit:
    """A vocabulary that is divided over several processes, in whole blocks."""

    head: VocabHead  # with the products of this process's tokens alone
    rank: int  # of this process
    tokens: Sequence[slice]  # of each process
    gather: Callable[[Tensor], Sequence[Tensor]]  # every process's tensor, all of one shape


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """Optional work of a scan; each option costs time."""

    bias: Tensor | None = None  # [rows, vocab], added to the scaled logits; -inf forbids a token
    floor: Tensor | None = None  # [rows, canvas]: tokens with a smaller scaled logit are forbidden
    num_top_k: int = 0  # also return this many tokens with their logits
    with_soft: bool = True
    compiled: bool = False  # fuse the element-wise part; the first call takes seconds


DEFAULT_OPTIONS = ScanOptions()


def scan_vocab(
    hidden: Tensor,
    head: VocabHead,
    temperature: Tensor,
    key: NoiseKey | None,
    options: ScanOptions = DEFAULT_OPTIONS,
    *,
    tile: int = BLOCK,
    positions: Tensor | None = None,
    split: VocabSplit | None = None,
) -> VocabScan:
    """Scan the vocabulary for `hidden` [rows, canvas, hidden] at a temperature per row [rows].

    Without a key, or at temperature 0, `sampled` is the argmax.
    positions: which ones of the canvas these are; None: all, from the first.
    split: each process scans its own tokens; all get the same result, to the bit.
    """
    tokens = slice(0, head.vocab_size)
    if split is not None:
        head, tokens = split.head, split.tokens[split.rank]
    part = scan_part(hidden, head, temperature, key, options, tokens=tokens, tile=tile, positions=positions)
    return join([part] if split is None else gather_parts(part, split))


@dataclass(frozen=True)
class ScanPart:
    """A scan over part of the vocabulary, in whole chunks."""

    table: Tensor  # [3, rows, canvas, chunks]: base, mass and moment of each chunk
    best: Lead
    race_winner: Lead
    terms: Terms  # of all tokens
    key: NoiseKey | None
    vocab_size: int
    embedding_scale: float
    soft: RunningMean | None
    running_top_k: RunningTopK | None
    positions: Tensor | None = None


def scan_part(
    hidden: Tensor,
    head: VocabHead,
    temperature: Tensor,
    key: NoiseKey | None,
    options: ScanOptions = DEFAULT_OPTIONS,
    *,
    tokens: slice,
    tile: int = BLOCK,
    positions: Tensor | None = None,
) -> ScanPart:
    """Scan the range `tokens`, which begins at a multiple of `SPLIT`."""
    assert tile % BLOCK == 0, tile
    assert tokens.start % SPLIT == 0, tokens
    # A floor is a logit that torch computed: only torch's own logits can be compared with it to the bit.
    kernels = kernels_for(hidden) if options.floor is None else None
    compiled = options.compiled and kernels is None  # the kernel is five times as fast as the compiled form
    scan_fn = compiled_scan_block() if compiled else scan_block
    every = Terms(temperature, head.logit_cap, options.bias, options.floor)
    # Allocated before the scan: small results kept between large temporaries would leave holes in the heap
    # that add up to the logits themselves.
    table = hidden.new_empty(
        3, *hidden.shape[:2], -(-(tokens.stop - tokens.start) // CHUNK), dtype=torch.float32
    )
    numbers = torch.arange(tokens.start // CHUNK, -(-tokens.stop // CHUNK), device=hidden.device)
    races = None
    if key is not None:
        index = numbers.expand(*hidden.shape[:2], -1)
        races = race_times(key, NoiseStream.CHUNK_RACE, index, positions)
    best = race_winner = None
    soft = RunningMean(compiled_accumulate() if compiled else accumulate) if options.with_soft else None
    running_top_k = RunningTopK(options.num_top_k) if options.num_top_k else None
    for begin in range(tokens.start, tokens.stop, tile):
        products = head.products(hidden, slice(begin, min(begin + tile, tokens.stop)))
        for offset in range(0, products.shape[-1], BLOCK):
            part = products[..., offset : offset + BLOCK]
            here = slice(begin + offset, begin + offset + part.shape[-1])
            terms = every._replace(bias=None if every.bias is None else every.bias[:, here])
            at = slice((here.start - tokens.start) // CHUNK, -(-(here.stop - tokens.start) // CHUNK))
            best = no_lead(part) if best is None else best
            race_winner = no_lead(part) if race_winner is None else race_winner
            race = None if races is None else races[..., at]
            if kernels is not None:
                first = here.start // CHUNK
                block = scan_block_native(kernels, part, terms, first, race, best, race_winner)
            else:
                block, best, race_winner = scan_fn(part, terms, numbers[at.start], race, best, race_winner)
            table[..., at] = torch.stack(
                (block.top[..., None].expand_as(block.mass), block.mass, block.moment)
            )
            if soft is not None:
                soft.add(head.mix(block.shares, here), block.top, block.mass.sum(-1))
            if running_top_k is not None:
                running_top_k.add(logits_of(part, terms), here)
    assert best is not None
    assert race_winner is not None
    return ScanPart(
        table, best, race_winner, every, key, head.vocab_size, head.embedding_scale,
        soft, running_top_k, positions,
    )  # fmt: skip


def gather_parts(part: ScanPart, split: VocabSplit) -> list[ScanPart]:
    """The parts of all processes. Only their tensors travel."""
    chunks = [-(-(tokens.stop - tokens.start) // CHUNK) for tokens in split.tokens]
    width = min(CHUNK, part.vocab_size)

    def gather(x: Tensor, size: int) -> list[Tensor]:
        """`x` padded at its end: a process may have less."""
        return list(split.gather(F.pad(x, (0, size - x.shape[-1]))))

    def leads(lead: Lead) -> list[Lead]:
        parts = (split.gather(lead.score), split.gather(lead.chunk), gather(lead.products, width))
        return [Lead(*each) for each in zip(*parts, strict=True)]

    tables = [
        table[..., :count] for table, count in zip(gather(part.table, max(chunks)), chunks, strict=True)
    ]
    softs: Sequence[RunningMean | None] = [None] * len(chunks)
    if part.soft is not None:
        soft = part.soft
        assert soft.top is not None
        sums = (split.gather(soft.top), split.gather(soft.total), split.gather(soft.mass))
        softs = [soft.of(*each) for each in zip(*sums, strict=True)]
    top_ks: Sequence[RunningTopK | None] = [None] * len(chunks)
    if part.running_top_k is not None:
        running = part.running_top_k
        assert running.tokens is not None
        missing = (0, running.count - running.tokens.shape[-1])
        top_ks = [
            running.of(*each)
            for each in zip(
                split.gather(F.pad(running.tokens, missing)),
                split.gather(F.pad(running.logits, missing, value=float("-inf"))),
                strict=True,
            )
        ]
    columns = (tables, leads(part.best), leads(part.race_winner), softs, top_ks)
    return [
        replace(part, table=table, best=best, race_winner=winner, soft=soft, running_top_k=top_k)
        for table, best, winner, soft, top_k in zip(*columns, strict=True)
    ]


def join(parts: Sequence[ScanPart]) -> VocabScan:
    """One scan from parts that cover the vocabulary in order."""
    first = parts[0]
    base, mass, moment = torch.cat([part.table for part in parts], dim=-1)
    top = base.amax(-1)
    lower = base - top[..., None]
    weight = lower.exp()
    total = (weight * mass).sum(-1)
    # Sum of p * (logit - top) over all tokens, chunk by chunk.
    moment = moment + torch.where(weight > 0, lower, 0.0) * mass
    entropy = total.log() - (weight * moment).sum(-1) / total
    log_mass = top + total.log()
    best = _best_lead([part.best for part in parts])
    argmax = best.chunk * CHUNK + _logits_of_lead(best, first).argmax(-1)
    sampled, sampled_logit = argmax, top
    if first.key is not None:
        winner = _best_lead([part.race_winner for part in parts])
        logits = _logits_of_lead(winner, first)
        sampled = race_in_chunk(logits, winner.chunk, first.key, first.positions)
        of_sampled = logits.gather(-1, (sampled - winner.chunk * CHUNK)[..., None])[..., 0]
        is_random = (first.terms.temperature > 0)[:, None]
        sampled = torch.where(is_random, sampled, argmax)
        sampled_logit = torch.where(is_random, of_sampled, top)
    scan = VocabScan(argmax, sampled, entropy.clamp(min=0.0), log_mass, top, sampled_logit=sampled_logit)
    means = [part.soft for part in parts if part.soft is not None]
    running_top_k = [part.running_top_k for part in parts if part.running_top_k is not None]
    return replace(
        scan,
        soft=(RunningMean.join(means) * first.embedding_scale).to(best.products.dtype) if means else None,
        top_k=RunningTopK.join(running_top_k) if running_top_k else None,
    )


def accumulate(total: Tensor, old: Tensor, mixed: Tensor, new: Tensor) -> Tensor:
    """A sum and what is added to it [rows, canvas, hidden], each with its factor [rows, canvas]."""
    return torch.addcmul(mixed.float() * new[..., None], total, old[..., None])


@cache
def compiled_accumulate() -> Accumulate:
    return torch.compile(accumulate)


@cache
def compiled_scan_block() -> ScanBlock:
    """`scan_block` as one fused kernel; the eager form is its reference implementation."""
    # By default a second shape makes sizes variable: no kernel per batch size.
    return torch.compile(scan_block)


def _best_lead(leads: Sequence[Lead]) -> Lead:
    best = leads[0]
    for lead in leads[1:]:
        is_better = lead.score < best.score
        best = Lead(
            torch.where(is_better, lead.score, best.score),
            torch.where(is_better, lead.chunk, best.chunk),
            torch.where(is_better[..., None], lead.products, best.products),
        )
    return best


def _logits_of_lead(lead: Lead, part: ScanPart) -> Tensor:
    """Scaled logits [rows, canvas, CHUNK] of the leading chunk's tokens, -inf past the last token."""
    width = lead.products.shape[-1]
    tokens = lead.chunk[..., None] * CHUNK + torch.arange(width, device=lead.chunk.device)
    scaled = logits_of(lead.products, part.terms._replace(bias=None, floor=None))
    inside = tokens < part.vocab_size
    if part.terms.bias is not None:
        bias = part.terms.bias[:, None].expand(*tokens.shape[:2], -1)
        scaled = scaled + bias.gather(-1, torch.where(inside, tokens, 0))
    if part.terms.floor is not None:
        inside = inside & (scaled >= part.terms.floor[..., None])
    return torch.where(inside, scaled, float("-inf"))


class RunningMean:
    """The soft embedding so far, relative to the largest logit so far."""

    top: Tensor | None  # [rows, canvas]; None before the first block
    total: Tensor  # [rows, canvas, hidden], fp32
    mass: Tensor  # [rows, canvas]

    def __init__(self, accumulate: Accumulate) -> None:
        self.top = None
        self._accumulate = accumulate

    def add(self, mixed: Tensor, top: Tensor, mass: Tensor) -> None:
        """Take a block's summed embeddings [rows, canvas, hidden], all relative to its `top`."""
        if self.top is None:
            self.top, self.total, self.mass = top, mixed.float(), mass
            return
        new_top = torch.maximum(self.top, top)
        finite = torch.where(new_top.isfinite(), new_top, 0.0)
        old, new = (self.top - finite).exp(), (top - finite).exp()
        self.total = self._accumulate(self.total, old, mixed, new)
        self.mass = self.mass * old + mass * new
        self.top = new_top

    def of(self, top: Tensor, total: Tensor, mass: Tensor) -> RunningMean:
        """One with these numbers."""
        other = RunningMean(self._accumulate)
        other.top, other.total, other.mass = top, total, mass
        return other

    @staticmethod
    def join(parts: Sequence[RunningMean]) -> Tensor:
        first = RunningMean(accumulate)
        for part in parts:
            assert part.top is not None
            first.add(part.total, part.top, part.mass)
        return first.total / first.mass[..., None]
