"""A request to the engine: what is to be written, what is pinned of it, and its validation.

A request is validated once, when it is submitted. The result is a `ValidatedRequest`, which carries the
resolved limits through the engine. Imports no torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dgemma.engine.request_images import check_images
from dgemma.errors import InputError, suggestion
from dgemma.images.preprocess import PlacedImage
from dgemma.model.config import ModelConfig
from dgemma.params import MAX_LOGPROBS, CanvasLen, GenerationParams
from dgemma.structured_output.constraint import Constraint

if TYPE_CHECKING:
    from dgemma.sampling.sampler import Sampler

TokenIds = tuple[int, ...]
Ids = TokenIds

DEFAULT_MAX_TOKENS = 1024
CANVAS_STEP = 8  # canvas_len "auto" chooses among its multiples
MAX_SET_TOKENS = 1 << 22  # in all sets of a request together
# Each bias is read in every vocabulary scan, so their number is limited.
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, kw_only=True)
class PinnedTokens:
    """The pinned tokens of an answer, by position from its first token on, through all its canvases."""

    fixed: Mapping[int, int] = field(default_factory=dict)
    """The token at this position."""
    among: Mapping[int, TokenIds] = field(default_factory=dict)
    """The allowed tokens at this position: the model samples among them."""
    begin: Mapping[int, int] = field(default_factory=dict)
    """The initial token of the canvas at this position, in place of noise. The model may change it."""
    watch: Mapping[int, TokenIds] = field(default_factory=dict)
    """Tokens whose log-probabilities at this position are reported when the canvas settles."""

    def __bool__(self) -> bool:
        return bool(self.fixed or self.among or self.begin or self.watch)

    @property
    def choices(self) -> dict[int, TokenIds]:
        """The allowed tokens of each fixed or limited position."""
        return {**self.among, **{position: (token,) for position, token in self.fixed.items()}}

    @classmethod
    def from_pins(cls, pins: Mapping[int, int | Sequence[int]] | None) -> PinnedTokens | None:
        """A token fixes a position; several limit it to these."""
        if not pins:
            return None
        fixed: dict[int, int] = {}
        among: dict[int, TokenIds] = {}
        for position, pin in pins.items():
            if isinstance(pin, int) and not isinstance(pin, bool):
                fixed[position] = pin
            elif isinstance(pin, Iterable) and not isinstance(pin, str | bytes):
                tokens = tuple(pin)
                # What is no token is refused by `check`, with the others.
                among[position] = tuple(sorted(set(tokens))) if all(map(_is_token, tokens)) else tokens
            else:
                raise InputError(f"the pin of position {position} is {pin!r}; give a token or several.")
        return cls(fixed=fixed, among=among)

    def check(self, vocab_size: int, max_tokens: int, canvas_len: int) -> None:
        """Raise if a position or a token is out of range.

        A canvas may begin with more tokens than are kept of it: the model sees them.
        """
        num_begun = -(-max_tokens // canvas_len) * canvas_len
        if beyond := [position for position in self.begin if _is_token(position) and position >= num_begun]:
            raise InputError(
                f"canvas has a token at position {beyond[0]}; the canvases of the answer have positions 0 to "
                f"{num_begun - 1}. Raise max_tokens or shorten the canvas.",
                field="canvas",
            )
        sets: tuple[tuple[str, Mapping[int, TokenIds], int], ...] = (
            ("fixed", {p: (t,) for p, t in self.fixed.items()}, max_tokens),
            ("among", self.among, max_tokens),
            ("begin", {p: (t,) for p, t in self.begin.items()}, num_begun),
            ("watch", self.watch, max_tokens),
        )
        if sum(len(tokens) for tokens in (*self.among.values(), *self.watch.values())) > MAX_SET_TOKENS:
            raise InputError(f"the sets of all positions hold more than {MAX_SET_TOKENS} tokens; give fewer.")
        for kind, positions, length in sets:
            for position, tokens in positions.items():
                if not _is_token(position) or not 0 <= position < length:
                    raise InputError(
                        f"position {position!r} is pinned; the answer has positions 0 to {length - 1}. "
                        "Raise max_tokens or move the pin.",
                        field="pins",
                    )
                if not tokens:
                    raise InputError(
                        f"position {position} has an empty set of tokens; nothing could stand there."
                    )
                if wrong := _wrong_token(tokens, vocab_size):
                    raise InputError(f"position {position} {wrong}", field="pins")
                if kind == "among" and position in self.fixed:
                    raise InputError(
                        f"position {position} is both fixed and limited to a set; give one of them."
                    )


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One answer to be written."""

    prompt: tuple[int, ...]  # token ids
    seed: int  # in place of params.seed, which is None
    params: GenerationParams  # deadline_s counts from submit, waiting included
    id: str = ""  # for logs
    row: int = 0  # copied to its events
    adapter: str | None = None  # by served name; None: the base
    drafts: bool = False  # also yield Draft events
    trace: bool = False  # also yield CanvasStep events
    priority: int = 0  # higher first; equal ones in order of arrival
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit; ids ascending
    sampler: Sampler | None = None  # in place of the one from `params`
    pinned: PinnedTokens | None = None  # pinned and watched positions
    constraint: Constraint | None = None  # the response format of its text
    score_from: int | None = None  # only score the prompt's tokens from here on
    prompt_logprobs: int | None = None  # list so many likely tokens with each scored one; None: score none
    tenant: str = ""  # whose fair share of the slots it uses
    max_tenant_seqs: int | None = None  # sequences of the tenant that may run at once; None: no limit
    cache_salt: str = ""  # prefixes are reused only by requests of the same salt
    images: tuple[PlacedImage, ...] = ()  # of the prompt, in ascending order

    @property
    def scored_from(self) -> int | None:
        """The first token of the prompt that is scored; None: none is."""
        return 1 if self.score_from is None and self.prompt_logprobs is not None else self.score_from

    @property
    def cache_root(self) -> bytes:
        """What cached prefixes depend on besides their tokens: prefixes are reused under the same one."""
        return repr((self.adapter, self.cache_salt)).encode()


@dataclass(frozen=True, kw_only=True)
class ValidatedRequest:
    """A request that the model can take, with its limits resolved."""

    request: EngineRequest
    decode: str  # of `params`; "diffuse" where there are pins; or "score"
    max_tokens: int  # that it may write
    canvas_len: int  # of its canvases, at most
    max_len: int  # tokens that its context may hold


def validate_request(
    request: EngineRequest,
    config: ModelConfig,
    *,
    adapters: Collection[str | None],
    prompt_name: str = "the prompt",
) -> ValidatedRequest:
    """Raise `InputError` if the model cannot take the request. Reads no state of an engine."""
    if request.adapter not in adapters:
        known = [name for name in adapters if name is not None]
        raise InputError.about("adapter", f"is {request.adapter!r}{suggestion(str(request.adapter), known)}")
    check_prompt(request.prompt, config.vocab_size, prompt_name)
    check_images(request.images, config, len(request.prompt))
    params, pinned = request.params, request.pinned
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
        raise InputError.about(
            "prompt_logprobs", f"is {request.prompt_logprobs}; it must be from 0 to {MAX_LOGPROBS}."
        )
    if request.score_from is not None:
        if pinned:
            raise InputError("a request that scores writes nothing, so it can have no pins.")
        length = _scored_len(request.prompt, request.score_from, config.max_positions)
        return ValidatedRequest(
            request=request, decode="score", max_tokens=0, canvas_len=config.canvas_len, max_len=length
        )
    canvas_len = resolve_canvas_len(config.canvas_len, params.canvas_len)
    unit = canvas_unit(config.canvas_len, params.canvas_len)
    max_tokens = resolve_max_tokens(config.max_positions, unit, len(request.prompt), params.max_tokens)
    decode: str = params.decode
    if pinned:
        if params.decode not in ("diffuse", "auto"):
            raise InputError(
                f'positions are pinned, and decode is "{params.decode}"; only a canvas can hold pins.',
                field="decode",
            )
        pinned.check(config.vocab_size, max_tokens, canvas_len)
        decode = "diffuse"
    if request.sampler is not None:
        _check_sampler(request, request.sampler, decode, config, canvas_len)
    if request.constraint is not None:
        _check_constraint(request.constraint, params, config.vocab_size, max_tokens, pinned)
    # The last token, or the last canvas, is never encoded.
    by_canvas = (max_tokens - 1) // unit * unit
    encoded = by_canvas if decode == "diffuse" else max_tokens - 1
    return ValidatedRequest(
        request=request,
        decode=decode,
        max_tokens=max_tokens,
        canvas_len=canvas_len,
        max_len=len(request.prompt) + encoded,
    )


def read_prompts(prompt: Any, to_ids: Callable[[str], Ids]) -> tuple[list[Ids], bool]:
    """Token ids of each prompt, and whether it was a list of them."""
    if isinstance(prompt, str):
        return [to_ids(prompt)], False
    if not isinstance(prompt, Sequence):
        raise InputError.about(
            "prompt", f"is a {type(prompt).__name__}; give text, token ids, or a list of either."
        )
    if not prompt:
        raise InputError.about("prompt", "is an empty list; give at least one prompt.")
    if all(isinstance(item, str) for item in prompt):
        return [to_ids(item) for item in prompt], True
    if all(map(_is_token, prompt)):
        return [tuple(prompt)], False
    if all(isinstance(item, Sequence) and all(map(_is_token, item)) for item in prompt):
        return [tuple(item) for item in prompt], True
    raise InputError.about(
        "prompt", "is a list of mixed things; give texts only, or lists of token ids only."
    )


def seeds_for(count: int, seeds: Sequence[int] | None, params: GenerationParams) -> tuple[int, ...]:
    """One seed per prompt: as pinned, else counted up from the one of `params`, else from a fresh one."""
    if seeds is None:
        # Short enough to be typed again.
        first = secrets.randbits(32) if params.seed is None else params.seed
        return tuple(first + row for row in range(count))
    if not isinstance(seeds, Sequence):
        raise InputError.about("seeds", f"is {seeds!r}; give a list of numbers, one for each prompt.")
    if len(seeds) != count:
        raise InputError.about("seeds", f"has {len(seeds)} numbers for {count} prompts; give one for each.")
    for seed in seeds:
        if seed is None:
            raise InputError.about("seeds", "has None; give a whole number for each prompt.")
        GenerationParams(seed=seed)  # checked like `seed`
    return tuple(seeds)


def check_prompt(prompt: Sequence[int], vocab_size: int, which: str = "the prompt") -> None:
    if not prompt:
        raise InputError(f"{which} is empty; give it at least one token.", field="prompt")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(
            f"{which} holds token {wrong}; this vocabulary ends at {vocab_size - 1}.", field="prompt"
        )


def resolve_canvas_len(own: int, requested: CanvasLen | None) -> int:
    """The length of a request's canvases, at most; `own`: the model's."""
    if requested is None or requested == "auto":
        return own
    if requested > own:
        raise InputError.about(
            "canvas_len", f"is {requested}; this model's own canvas has {own} tokens. Give at most these."
        )
    return requested


def canvas_unit(own: int, requested: CanvasLen | None) -> int:
    """Canvases begin and end at multiples of this many tokens of the answer."""
    return 1 if requested == "auto" else resolve_canvas_len(own, requested)


def auto_canvas_len(num_tokens: int, most: int) -> int:
    """The canvas for at most `num_tokens`: few different lengths, so that requests share a batch."""
    return min(-(-num_tokens // CANVAS_STEP) * CANVAS_STEP, most)


def most_new_tokens(max_positions: int, unit: int, prompt_len: int) -> int:
    """How many tokens may be written after a prompt: only whole canvases fit."""
    return max(0, max_positions - prompt_len) // unit * unit


def resolve_max_tokens(max_positions: int, unit: int, prompt_len: int, requested: int | None) -> int:
    """How many tokens may be written."""
    limit = most_new_tokens(max_positions, unit, prompt_len)
    if limit == 0:
        raise InputError(
            f"the prompt has {prompt_len} tokens; this model's context of {max_positions} then has no "
            f"room for a canvas of {unit}. Shorten the prompt.",
            field="prompt",
            code="context_length_exceeded",
        )
    if requested is not None and requested > limit:
        raise InputError.about(
            "max_tokens",
            f"is {requested}; this model's context leaves {limit}. Lower it or shorten the prompt.",
            code="context_length_exceeded",
        )
    return min(DEFAULT_MAX_TOKENS, limit) if requested is None else requested


def _scored_len(prompt: Sequence[int], score_from: int, max_positions: int) -> int:
    if type(score_from) is not int or not 1 <= score_from <= len(prompt):
        raise InputError.about(
            "score_from",
            f"is {score_from} for a prompt of {len(prompt)} tokens; it must be from 1 to "
            f"{len(prompt)}: a token is scored from those before it.",
        )
    if len(prompt) > max_positions:
        raise InputError(
            f"the text has {len(prompt)} tokens; this model's context holds {max_positions}.",
            field="prompt",
            code="context_length_exceeded",
        )
    return len(prompt)


def _check_constraint(
    constraint: Constraint,
    params: GenerationParams,
    vocab_size: int,
    max_tokens: int,
    pinned: PinnedTokens | None,
) -> None:
    """Raise if no answer could satisfy the constraint."""
    token_dfa = constraint.token_dfa
    if len(token_dfa.class_of_token) != vocab_size:
        raise InputError(
            f"the constraint was compiled for {len(token_dfa.class_of_token)} tokens; "
            f"this model has {vocab_size}. Compile it for this model."
        )
    if constraint.end is None and (params.ignore_end or not {*constraint.end_tokens} & {*params.end_tokens}):
        raise InputError("a constraint needs an end token after the text; do not ignore it (ignore_end).")
    stop = constraint.stop(max_tokens)
    if not 0 <= constraint.begin <= stop <= max_tokens:
        raise InputError(
            f"the constraint covers positions {constraint.begin} to {stop} of {max_tokens} tokens."
        )
    fixed = {} if pinned is None else pinned.fixed
    if any(at not in fixed for at in (*range(constraint.begin), *range(stop, max_tokens))):
        raise InputError("every position outside the constraint must be fixed.")
    choices = {} if pinned is None else pinned.choices
    if constraint.completable_states(constraint.begin, max_tokens, choices)[0]:
        return
    if not constraint.completable_states(constraint.begin, max_tokens, {})[0]:
        if constraint.end is not None:
            raise InputError(f"no text of exactly {stop - constraint.begin} tokens satisfies the constraint.")
        raise InputError.about(
            "max_tokens",
            f"is {max_tokens}; the shortest text that satisfies the constraint has "
            f"{int(token_dfa.distance[0])} tokens. Raise it.",
        )
    raise InputError("no text satisfies both the constraint and the pins.")


def _check_sampler(
    request: EngineRequest, sampler: Sampler, decode: str, config: ModelConfig, canvas_len: int
) -> None:
    """Raise if the request cannot be written by a caller's sampler, such as one of masked diffusion."""
    if type(sampler.num_steps) is not int or sampler.num_steps < 1:
        raise InputError.about(
            "sampler",
            f"cannot run: its num_steps is {sampler.num_steps!r}; it must be a whole number of at least 1.",
        )
    if sampler.unmask is None:
        return
    if config.mask_token is None:
        raise InputError.about(
            "sampler",
            "unmasks positions, and this model's config.json names no mask_token_id: it was not trained on "
            "masked canvases (DiffusionGemma's noise is random tokens). Leave out Sampler(unmask=...).",
        )
    if problem := sampler.unmask.problem(canvas_len, sampler.num_steps):
        raise InputError.about("sampler", f"unmasks positions, and {problem}")
    if request.params.canvas_len == "auto" and sampler.unmask.block_len is not None:
        raise InputError.about(
            "canvas_len",
            f'is "auto", and the sampler unmasks blocks of {sampler.unmask.block_len}; a shorter canvas need '
            "not be whole blocks. Give a number, or leave out block_len.",
        )
    if decode != "diffuse":
        raise InputError.about(
            "decode", f'is "{decode}", and the sampler unmasks positions; only decode "diffuse" does that.'
        )
    if request.constraint is not None:
        raise InputError.about(
            "sampler",
            "unmasks positions, and the request has a response format; positions sampled one after another "
            "are not checked against it. Leave out one of them.",
        )
    among = {} if request.pinned is None else request.pinned.among
    for position, tokens in among.items():
        if tokens == (config.mask_token,):
            raise InputError(
                f"position {position} may only hold the mask token {config.mask_token}; no step samples it."
            )


def _wrong_token(tokens: TokenIds, vocab_size: int) -> str | None:
    """What is wrong with a set of tokens."""
    # A set may hold the whole vocabulary: types and range are read by builtins before a wrong token is named.
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
        for token in tokens:
            if not _is_token(token) or not 0 <= token < vocab_size:
                return f"is pinned to token {token!r}; this vocabulary ends at {vocab_size - 1}."
    if len(set(tokens)) != len(tokens):
        return "has a token twice in its set; give each once."
    return None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
