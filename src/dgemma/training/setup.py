"""From a recipe to everything a run needs: model, what is trained, data, and the way to compute."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dgemma.errors import CheckpointError, InputError
from dgemma.language_model import LanguageModel, load
from dgemma.model.coded_weight import CodedWeight
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution, default_execution
from dgemma.model.lora import attach, lora_parameters
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.training.canvases import CanvasSettings
from dgemma.training.data_progress import Progress
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.records import RecordReader
from dgemma.training.sources import RecordSource, StreamSource, open_files, open_source
from dgemma.training.stream import ExampleStream
from dgemma.training.weights import choose_trained

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Beyond these the plain forms win: a copy of an expert's weights per block, and every attention score.
MAX_BLOCK_WEIGHTS = 1 << 20
MAX_EXPLICIT_TOKENS = 1024
EXPERT_BLOCK = 128
_PAD_CHOSEN = 256
_CONTEXT_LENGTHS = 8
_GUESSED_PARTS = 4


@dataclass(frozen=True)
class Setup:
    """A run, ready to begin."""

    lm: LanguageModel  # adapted, if it is an adapter that is trained
    trained: dict[str, nn.Parameter]
    stream: ExampleStream
    held_out: ExampleStream | None
    canvases: CanvasSettings


def prepare(recipe: Recipe, *, lm: LanguageModel | None = None, progress: Progress | None = None) -> Setup:
    """Load, adapt and open. `lm`: a model already loaded, in place of `recipe.model`."""
    dtype = DTYPES[recipe.precision]
    if lm is None:
        lm = load(recipe.model, dtype=_NAMES[dtype], device=recipe.device)
    if lm.dtype != dtype:
        raise InputError(f"precision is {recipe.precision!r}, but the model is in {lm.dtype}; load it so.")
    _check_base(recipe, lm)
    _check_lengths(recipe, lm.config)
    canvas_len = recipe.noise.canvas_len or lm.config.canvas_len
    rows = (recipe.micro_batch or recipe.batch) * recipe.noise.canvases
    execution = training_execution(recipe, lm.config, lm.device)
    if recipe.train == "lora":
        # Factors in float32 are their own masters: products run in the model's dtype in any case.
        stack = attach(lm.stack, recipe.lora, seed=recipe.seed, dtype=torch.float32)
        trained = lora_parameters(stack)
        for module in stack.modules():  # the adapted stack's own: the base goes on as it was
            if isinstance(module, CodedWeight):
                module.rounds_activations = False  # gradients do not see rounding, so nothing else shall
    else:
        stack = lm.stack
        trained = choose_trained(stack, recipe.freeze)
    lm = lm.with_stack(stack.with_execution(execution))
    if recipe.compile:
        compile_layers(lm)
    return Setup(
        lm=lm,
        trained=trained,
        stream=open_stream(recipe.data, lm, recipe.seed, progress),
        held_out=None
        if recipe.held_out is None
        else open_stream(recipe.held_out.data, lm, recipe.seed, progress),
        canvases=CanvasSettings(
            canvas_len=canvas_len,
            vocab_size=lm.config.vocab_size,
            fill_token=_fill_token(lm),
            seed=recipe.seed,
            self_conditioning=recipe.noise.self_conditioning,
            guesses=recipe.noise.guesses,
            pad_to=_pad_to(recipe),
            pad_chosen_to=_PAD_CHOSEN if recipe.compile else 1,
            pad_guessed_to=-(-rows // _GUESSED_PARTS) if recipe.compile else 1,
            per_example=recipe.noise.canvases,
            # What nobody learns from need not be computed.
            encode_answers=recipe.noise.encoder_weight > 0,
            noise_power=recipe.noise.power,
        ),
    )


_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def training_execution(recipe: Recipe, config: ModelConfig, device: torch.device) -> Execution:
    """How to compute on this device: small experts in blocks, short texts with explicit attention."""
    plain = default_execution(device, DTYPES[recipe.precision])
    on_cpu = device.type == "cpu"
    small = 2 * config.expert_size * config.hidden_size <= MAX_BLOCK_WEIGHTS
    return Execution(
        grouped_experts=plain.grouped_experts,
        expert_block=EXPERT_BLOCK if on_cpu and small else None,
        explicit_attention=on_cpu and recipe.data.max_length <= MAX_EXPLICIT_TOKENS,
        recompute_layers=recipe.recompute,
    )


def compile_layers(lm: LanguageModel) -> None:
    """Fuse layer by layer: one small graph per kind of layer and door, whatever the depth."""
    execution = lm.stack.execution
    if lm.dtype == torch.float32 and execution.expert_block is None:
        raise InputError(
            "compile is on with precision 'fp32', and torch cannot trace large experts in float32; "
            "use precision: bf16, or compile: false."
        )
    from torch._dynamo import config

    # Two kinds of layers, each encoded (at several lengths), denoised with gradients, and without them for a
    # quarter of the rows or more.
    config.recompile_limit = max(config.recompile_limit, 32)
    if lm.device.type == "cpu":
        _spare_gcc_a_wrong_turn()
    for layer in lm.stack.layers:
        layer.compile(dynamic=False)


def _spare_gcc_a_wrong_turn() -> None:
    """Keep GCC from packing scalar code into vectors: torch writes the vectors of its CPU kernels itself.

    GCC 12 with -O3 miscompiles the transposed 32 x 32 bf16 tiles of the backward pass where a head has 64
    dimensions or more: gradients that are wrong or not finite. torch has no setting for a flag of one's own,
    so it rides on one that is passed on as it stands.
    """
    from torch._inductor import config, cpp_builder

    flag = " -fno-tree-slp-vectorize"
    contract = config.cpp.enable_floating_point_contract_flag
    if cpp_builder.is_gcc() and not contract.endswith(flag):
        config.cpp.enable_floating_point_contract_flag = contract + flag


def open_stream(
    recipe: DataRecipe, lm: LanguageModel, seed: int, progress: Progress | None = None
) -> ExampleStream:
    tokenizer = lm.tokenizer if lm.has_tokenizer else None
    template = lm.chat_template if lm.has_tokenizer and lm.has_chat_template else None
    return _open_stream(recipe, tokenizer, template, lm.config.vocab_size, seed, progress)


def open_stream_of_files(recipe: DataRecipe, path: Path, config: ModelConfig, seed: int) -> ExampleStream:
    """The same without the model's weights: text is read with the files beside them."""
    has_tokenizer = (path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None
    template = None
    if tokenizer is not None:
        with contextlib.suppress(CheckpointError):
            template = ChatTemplate.from_directory(path, tokenizer)
    return _open_stream(recipe, tokenizer, template, config.vocab_size, seed, None)


def _open_stream(
    recipe: DataRecipe,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    vocab_size: int,
    seed: int,
    progress: Progress | None,
) -> ExampleStream:
    reader = RecordReader(
        tokenizer=tokenizer,
        template=template,
        prompt_format=recipe.prompt_format,
        max_length=recipe.max_length,
        thinking=recipe.thinking,
        vocab_size=vocab_size,
    )
    if recipe.path is not None:
        source: RecordSource | StreamSource = open_files(
            [recipe.path, *recipe.also], reader, progress=progress
        )
    else:
        assert recipe.records is not None
        source = open_source(recipe.records, reader, progress=progress)
    return ExampleStream(
        source,
        seed=seed,
        shuffle=recipe.shuffle,
        buffer_len=recipe.shuffle_buffer,
    )


def _pad_to(recipe: Recipe) -> int:
    if not recipe.compile:
        return 1
    # Whole examples all get one length; contexts alone differ too much for that, so they get a few.
    parts = 1 if recipe.noise.encoder_weight > 0 else _CONTEXT_LENGTHS
    return -(-recipe.data.max_length // parts)


def _check_base(recipe: Recipe, lm: LanguageModel) -> None:
    """A base in few bits is frozen, and its products are not traced."""
    if not any(isinstance(module, CodedWeight) for module in lm.stack.modules()):
        return
    if recipe.train != "lora":
        raise InputError(
            f"train is {recipe.train!r}, but the model is quantized; only an adapter can be trained."
        )
    if recipe.compile:
        raise InputError(
            "compile is on, but the model is quantized, and its products are not traced; turn it off."
        )


def _check_lengths(recipe: Recipe, config: ModelConfig) -> None:
    canvas_len = recipe.noise.canvas_len or config.canvas_len
    if recipe.data.max_length + canvas_len > config.max_positions:
        raise InputError(
            f"data.max_length is {recipe.data.max_length}; this model's {config.max_positions} positions "
            f"leave {config.max_positions - canvas_len} before a last canvas. Lower it."
        )


def _fill_token(lm: LanguageModel) -> int:
    """What stands behind an answer's end: eos, which generation stops at."""
    if lm.has_tokenizer and lm.tokenizer.eos_id is not None:
        return lm.tokenizer.eos_id
    return lm.generation_defaults.end_tokens[0]
