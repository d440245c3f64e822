"""The recipe of a training run: typed dataclasses that check their values. `recipe_file.py` reads files.

Every default that affects the result is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dgemma.errors import InputError, suggestion
from dgemma.model.lora import PARTS, LoraSettings
from dgemma.training.data.records import IGNORED_KEYS


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The source of training examples; docs/training-data.md describes the formats.

    path: a JSONL, Parquet or text file, a directory, or a pattern such as "notes/*.md".
    also: more such paths, of any format, mixed in proportion to their numbers of records; a path listed twice
      counts twice.
    records: instead of a path, from a Python recipe: a sequence or a stream of records or `TrainingExample`s.
    max_length: examples are truncated to this many tokens.
    packed_length: the encoder reads rows of this many tokens, each with as many examples as fit. None: one
      example per row, which wastes time where lengths differ. The result is the same.
    prompt_format: "chat", "raw", or "auto": chat where the checkpoint has a template.
    thinking: whether chats without a "thinking" entry are rendered with thinking on.
    shuffle_buffer: records in the buffer that shuffles a stream.
    ignored_keys: keys of records, or columns of tables, that are left out.
    """

    path: str | None = None
    also: tuple[str, ...] = ()
    records: Iterable[Any] | None = None
    max_length: int = 1024
    packed_length: int | None = None
    prompt_format: Literal["auto", "chat", "raw"] = "auto"
    thinking: bool = False
    shuffle: bool = True
    shuffle_buffer: int = 1024
    ignored_keys: tuple[str, ...] = IGNORED_KEYS

    def __post_init__(self) -> None:
        if (self.path is None) == (self.records is None):
            raise InputError.about("data", "needs a path, or records from a Python recipe, and not both.")
        if self.also and self.path is None:
            raise InputError.about("data.also", "adds to a path, and data has none.")
        _check_integer("data.max_length", self.max_length, 2)
        if self.packed_length is not None:
            _check_integer("data.packed_length", self.packed_length, self.max_length)
        _check_integer("data.shuffle_buffer", self.shuffle_buffer, 1)


@dataclass(frozen=True, kw_only=True)
class NoiseRecipe:
    """The settings of the training objective.

    canvas_len: None for the model's own.
    canvases: canvases per example. The example is encoded once for all of them.
    self_conditioning: the share of canvases that are conditioned on a prediction of their own.
    guesses: the largest number of passes that make this prediction. Each pass is conditioned on the one
      before, as at inference. 1 is the published value.
    encoder_weight: the weight of the encoder's next-token loss, added to the diffusion loss.
    power: noise levels are u ** power for uniform u. Below 1, high levels are more frequent, which helps
      where low levels are soon learned.
    shifted: the share of examples whose canvases begin anywhere in the response, as after a prompt of any
      length, and not at multiples of the canvas length. For plain text.
    runs: the share of canvases whose noise is a run of neighbours, as in a gap to fill; short runs are the
      most frequent.
    """

    canvas_len: int | None = None
    canvases: int = 1
    self_conditioning: float = 0.5
    guesses: int = 1
    encoder_weight: float = 1.0
    power: float = 1.0
    shifted: float = 0.0
    runs: float = 0.0

    def __post_init__(self) -> None:
        if self.canvas_len is not None:
            _check_integer("noise.canvas_len", self.canvas_len, 1)
        _check_integer("noise.canvases", self.canvases, 1)
        _check_number("noise.self_conditioning", self.self_conditioning, 0, 1)
        _check_integer("noise.guesses", self.guesses, 1)
        _check_number("noise.encoder_weight", self.encoder_weight, 0)
        _check_number("noise.power", self.power, 0.01)
        _check_number("noise.shifted", self.shifted, 0, 1)
        _check_number("noise.runs", self.runs, 0, 1)


@dataclass(frozen=True, kw_only=True)
class RolloutRecipe:
    """Settings of the objectives that follow the sampler's own paths, "distill" and "reward".

    steps: "distill" learns the states before steps 1 to this one; "reward" follows a path for at most so many
      steps.
    states: of each path that "distill" learns, chosen among those that it has. More of them share the cost of
      the path.
    target: what "distill" learns: "data", the response; "teacher", the canvas that the model of the run's
      start settles on.
    samples: paths per example, which "reward" compares with each other.
    reward: of "reward": "module:name" or "file.py:name" of a function from `RolloutAnswer` to a number; in a
      Python recipe the function itself.
    sampling: options of `GenerationParams` in place of the checkpoint's own, such as {"t_max": 0.6}.
    """

    steps: int = 4
    states: int = 1
    target: Literal["data", "teacher"] = "data"
    samples: int = 8
    reward: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_integer("rollout.steps", self.steps, 1)
        _check_integer("rollout.states", self.states, 1)
        _check_integer("rollout.samples", self.samples, 2)


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """Adam with decoupled weight decay (on matrices only) and its learning rate over time.

    kind: "muon" updates matrices by orthogonalized momentum, at the same learning rate. It reaches the same
      loss in fewer steps when all weights are trained. Embedding, router, norms and scales keep Adam.
    momentum: of Muon. clip: the limit of the global gradient norm; None for no clipping.
    warmup: the share of steps over which the learning rate rises.
    decay: how it falls afterwards, to `final` times the peak.
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
        _check_number("optimizer.learning_rate", self.learning_rate, 0)
        for beta in self.betas:
            _check_number("optimizer.betas", beta, 0, 0.999999)
        _check_number("optimizer.eps", self.eps, 1e-30)
        _check_number("optimizer.momentum", self.momentum, 0, 0.999999)
        _check_number("optimizer.weight_decay", self.weight_decay, 0)
        if self.clip is not None:
            _check_number("optimizer.clip", self.clip, 1e-30)
        _check_number("optimizer.warmup", self.warmup, 0, 1)
        _check_number("optimizer.final", self.final, 0, 1)


@dataclass(frozen=True, kw_only=True)
class SavingRecipe:
    """When the state is saved: each `every` steps and at an interrupt. The last `keep` states are kept."""

    every: int = 200
    keep: int = 2

    def __post_init__(self) -> None:
        _check_integer("saving.every", self.every, 1)
        _check_integer("saving.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class HeldOutRecipe:
    """Data that is never trained on: evaluated each `every` steps and at the end.

    examples: the number of examples of an evaluation, always the same ones with the same noise.
    """

    data: DataRecipe
    every: int = 200
    examples: int = 64

    def __post_init__(self) -> None:
        _check_integer("held_out.every", self.every, 1)
        _check_integer("held_out.examples", self.examples, 1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    model: a checkpoint directory or hub name. out: the run's directory.
    train: "lora" trains an adapter, "all" the weights themselves. freeze: parts that "all" does not train.
    batch: examples per step. micro_batch: examples per forward; None for all at once.
    objective: "denoise" learns corrupted canvases; "distill" and "reward" those of the sampler's own paths:
        from the response, and from what a function says of the answer.
    precision: "bf16" computes in bfloat16 and keeps trained weights in float32; "fp32" is float32 throughout;
        "auto" is bf16, or fp32 on a processor that does not multiply bfloat16. A run keeps its first choice.
    compile: compile the layers, which takes a minute or more. Examples are then padded to max_length.
    callbacks: names of `TrainerCallback`s: "tensorboard", "module:name" or "file.py:name".
    recompute: activation checkpointing. The backward pass computes a layer's activations again.
    """

    model: str
    out: str
    data: DataRecipe
    held_out: HeldOutRecipe | None = None
    train: Literal["lora", "all"] = "lora"
    freeze: tuple[str, ...] = ("router",)
    lora: LoraSettings = field(default_factory=LoraSettings)
    objective: Literal["denoise", "distill", "reward"] = "denoise"
    rollout: RolloutRecipe = field(default_factory=RolloutRecipe)
    noise: NoiseRecipe = field(default_factory=NoiseRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    steps: int = 1000
    batch: int = 8
    micro_batch: int | None = None
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: str = "cpu"
    compile: bool = False
    recompute: bool = False
    callbacks: tuple[str, ...] = ()
    saving: SavingRecipe = field(default_factory=SavingRecipe)

    def __post_init__(self) -> None:
        _check_integer("steps", self.steps, 1)
        _check_integer("batch", self.batch, 1)
        if self.micro_batch is not None:
            _check_integer("micro_batch", self.micro_batch, 1)
            if self.batch % self.micro_batch:
                raise InputError.about(
                    "micro_batch", f"is {self.micro_batch}, batch is {self.batch}; it must divide batch."
                )
        _check_integer("seed", self.seed, 0)
        if (self.objective == "reward") != (self.rollout.reward is not None):
            raise InputError.about(
                "rollout.reward", "goes with objective: reward. Give both of them, or none."
            )
        if self.objective == "reward" and self.noise.canvases > 1:
            raise InputError.about(
                "noise.canvases", f"is {self.noise.canvases}; with objective: reward it is 1."
            )
        if self.train == "lora" and self.optimizer.kind == "muon":
            raise InputError.about(
                "optimizer.kind",
                "is 'muon' with train 'lora': an adapter's two factors are no matrices to orthogonalize "
                "one by one. Use kind: adam, or train: all.",
            )
        known = ("embedding", "norms", *PARTS)
        for part in self.freeze:
            if part not in known:
                raise InputError.about(
                    "freeze",
                    f"has {part!r}, which is no part of the stack{suggestion(part, known)} "
                    f"Parts: {', '.join(known)}.",
                )


def _check_integer(name: str, value: int, low: int) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not low <= value < 1 << 63:
        raise InputError.about(
            name, f"is {value!r}; it must be a whole number from {low} to {(1 << 63) - 1}."
        )


def _check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or value == math.inf:
        rule = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InputError.about(name, f"is {value!r}; it must be a number {rule}.")
