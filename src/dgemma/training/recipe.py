"""A training run, written down: one small typed, checked value. `recipe_file.py` reads it from files.

Every default that matters to the result is here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dgemma.errors import InputError, suggestion
from dgemma.model.lora import PARTS, LoraSettings


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where examples come from; docs/training-data.md has the formats.

    path: a JSONL or text file, a directory, or a pattern such as "notes/*.md".
    also: more such paths, of any format, mixed in by their numbers of records; one given twice counts twice.
    records: instead of a path, from a Python recipe: a sequence or a stream of records or `Example`s.
    max_length: examples are cut behind so many tokens.
    prompt_format: "chat", "raw", or "auto": chat where the checkpoint has a template.
    thinking: whether chats that do not say are rendered with thinking on.
    shuffle_buffer: records in the buffer that shuffles a stream.
    """

    path: str | None = None
    also: tuple[str, ...] = ()
    records: Iterable[Any] | None = None
    max_length: int = 1024
    prompt_format: Literal["auto", "chat", "raw"] = "auto"
    thinking: bool = False
    shuffle: bool = True
    shuffle_buffer: int = 1024

    def __post_init__(self) -> None:
        if (self.path is None) == (self.records is None):
            raise InputError("data needs a path, or records from a Python recipe, and not both.")
        if self.also and self.path is None:
            raise InputError("data.also adds to a path, and data has none.")
        _whole("data.max_length", self.max_length, 2)
        _whole("data.shuffle_buffer", self.shuffle_buffer, 1)


@dataclass(frozen=True, kw_only=True)
class NoiseRecipe:
    """The objective's settings.

    canvas_len: None for the model's own. canvases: so many of each example, which is encoded once for all.
    self_conditioning: the share of canvases that see a guess of their own. guesses: it is the last of up
    to so many passes, each of which sees the one before, as at inference; 1 is what is published.
    encoder_weight: of the encoder's next-token loss beside the diffusion loss.
    power: noise levels are u ** power for uniform u; below 1 there is more of high levels, where a task
    is learned whose low levels are soon easy.
    """

    canvas_len: int | None = None
    canvases: int = 1
    self_conditioning: float = 0.5
    guesses: int = 1
    encoder_weight: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.canvas_len is not None:
            _whole("noise.canvas_len", self.canvas_len, 1)
        _whole("noise.canvases", self.canvases, 1)
        _real("noise.self_conditioning", self.self_conditioning, 0, 1)
        _whole("noise.guesses", self.guesses, 1)
        _real("noise.encoder_weight", self.encoder_weight, 0)
        _real("noise.power", self.power, 0.01)


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """Adam with decoupled weight decay (on matrices only) and its learning rate over time.

    kind: "muon" moves matrices by orthogonalized momentum instead, at the same rate: fewer steps to the same
    loss when all weights are trained; embedding, router, norms and scales keep Adam. momentum: Muon's.
    warmup: the share of steps over which the rate rises. decay: how it falls afterwards, to `final` of
    its height. clip: the largest norm of all gradients together; None for none.
    """

    kind: Literal["adam", "muon"] = "adam"
    learning_rate: float = 1.5e-4
    betas: tuple[float, float] = (0.95, 0.99)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 1e-4
    clip: float | None = 1.0
    warmup: float = 0.02
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.1

    def __post_init__(self) -> None:
        _real("optimizer.learning_rate", self.learning_rate, 0)
        for beta in self.betas:
            _real("optimizer.betas", beta, 0, 0.999999)
        _real("optimizer.eps", self.eps, 1e-30)
        _real("optimizer.momentum", self.momentum, 0, 0.999999)
        _real("optimizer.weight_decay", self.weight_decay, 0)
        if self.clip is not None:
            _real("optimizer.clip", self.clip, 1e-30)
        _real("optimizer.warmup", self.warmup, 0, 1)
        _real("optimizer.final", self.final, 0, 1)


@dataclass(frozen=True, kw_only=True)
class SavingRecipe:
    """When the run's state is kept: every so many steps, and when it is interrupted. `keep` states stay."""

    every: int = 200
    keep: int = 2

    def __post_init__(self) -> None:
        _whole("saving.every", self.every, 1)
        _whole("saving.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class HeldOutRecipe:
    """Data that is never trained on, looked at every so many steps and at the end.

    examples: so many are looked at each time, always the same with the same noise.
    """

    data: DataRecipe
    every: int = 200
    examples: int = 64

    def __post_init__(self) -> None:
        _whole("held_out.every", self.every, 1)
        _whole("held_out.examples", self.examples, 1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    model: a checkpoint directory or hub name. out: the run's directory.
    train: "lora" trains an adapter, "all" the weights themselves. freeze: parts that "all" leaves alone.
    batch: examples per step. micro_batch: examples per forward; None for all at once.
    precision: "bf16" computes in bfloat16 and keeps what is trained in float32; "fp32" is float32 throughout.
    compile: fuse the layers; takes a minute or more at the start. Examples are then padded to max_length.
    recompute: make a layer's inner numbers again in the backward pass instead of keeping them.
    """

    model: str
    out: str
    data: DataRecipe
    held_out: HeldOutRecipe | None = None
    train: Literal["lora", "all"] = "lora"
    freeze: tuple[str, ...] = ("router",)
    lora: LoraSettings = field(default_factory=LoraSettings)
    noise: NoiseRecipe = field(default_factory=NoiseRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    steps: int = 1000
    batch: int = 8
    micro_batch: int | None = None
    seed: int = 0
    precision: Literal["bf16", "fp32"] = "bf16"
    device: str = "cpu"
    compile: bool = False
    recompute: bool = False
    tensorboard: bool = True
    saving: SavingRecipe = field(default_factory=SavingRecipe)

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 1)
        _whole("batch", self.batch, 1)
        if self.micro_batch is not None:
            _whole("micro_batch", self.micro_batch, 1)
            if self.batch % self.micro_batch:
                raise InputError(
                    f"micro_batch is {self.micro_batch}, batch is {self.batch}; it must divide batch."
                )
        _whole("seed", self.seed, 0)
        if self.train == "lora" and self.optimizer.kind == "muon":
            raise InputError(
                "optimizer.kind is 'muon' with train 'lora': an adapter's two factors are no matrices to "
                "orthogonalize one by one. Use kind: adam, or train: all."
            )
        known = ("embedding", "norms", *PARTS)
        for part in self.freeze:
            if part not in known:
                raise InputError(
                    f"freeze has {part!r}, which is no part of the stack{suggestion(part, known)} "
                    f"Parts: {', '.join(known)}."
                )


def _whole(name: str, value: int, low: int) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not low <= value < 1 << 63:
        raise InputError(f"{name} is {value!r}; it must be a whole number from {low} to {(1 << 63) - 1}.")


def _real(name: str, value: float, low: float, high: float = math.inf) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or value == math.inf:
        rule = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InputError(f"{name} is {value!r}; it must be a number {rule}.")
