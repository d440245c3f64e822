"""Prepare a training run from its recipe: load the model, choose the trained parameters, open the data."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dgemma.checkpoint.device import check_device
from dgemma.errors import CheckpointError, InputError
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.machine import has_fast_bf16
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution, default_execution
from dgemma.model.lora import attach, lora_parameters
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.sampling.sampler import Sampler, make_sampler
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.tokenizer import Tokenizer, has_tokenizer
from dgemma.training.data.canvases import CanvasSettings
from dgemma.training.data.records import Progress, RecordReader
from dgemma.training.data.sources import RecordSource, StreamSource, open_files, open_source
from dgemma.training.data.stream import ExampleStream
from dgemma.training.optimizer import choose_trained
from dgemma.training.recipe import DataRecipe, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Above these sizes, expert blocks (a copy of an expert's weights per block) and explicit attention (every
# score allocated) are slower than the plain implementations.
MAX_BLOCK_WEIGHTS = 1 << 20
MAX_EXPLICIT_TOKENS = 1024
EXPERT_BLOCK = 128
_PAD_CHOSEN = 256
_PAD_PACKED = 4
_CONTEXT_LENGTHS = 8
_GUESSED_SIZES = 4


@dataclass(frozen=True)
class TrainingSetup:
    """All that the training loop needs."""

    lm: LanguageModel  # with the adapter, if an adapter is trained
    trained: dict[str, nn.Parameter]
    stream: ExampleStream
    held_out: ExampleStream | None
    canvases: CanvasSettings
    sampler: Sampler | None  # of the objectives that follow its paths
    teacher: Transformer | None  # the model as it was at the start of the run


def resolve_precision(
    recipe: Recipe, *, begun_with: str | None = None, lm: LanguageModel | None = None
) -> Recipe:
    """`recipe` with what "auto" means: what the run began with, what the model has, or what is fast here."""
    if recipe.precision != "auto":
        return recipe
    if begun_with is not None:
        is_fp32 = begun_with == "fp32"
    elif lm is not None:
        is_fp32 = lm.dtype is torch.float32
    else:
        is_fp32 = torch.device(recipe.device).type == "cpu" and not has_fast_bf16()
    return replace(recipe, precision="fp32" if is_fp32 else "bf16")


def prepare(
    recipe: Recipe,
    *,
    lm: LanguageModel | None = None,
    mesh: DeviceMesh | None = None,
    progress: Progress | None = None,
) -> TrainingSetup:
    """Load the model, attach an adapter, open the data.

    lm: a loaded model, in place of `recipe.model`. mesh: of the processes that divide it.
    """
    recipe = resolve_precision(recipe, lm=lm)
    dtype = DTYPES[recipe.precision]
    source = None
    if mesh is not None:
        from dgemma.training.shards import check_divisible, divide, open_unread, read_own_rows

        check_divisible(recipe, mesh.size())
        lm, source = open_unread(recipe.model, dtype)
    elif lm is None:
        lm = load(recipe.model, dtype=_NAMES[dtype], device=recipe.device)
    if lm.dtype != dtype:
        raise InputError.about(
            "precision", f"is {recipe.precision!r}, but the model is in {lm.dtype}; load it so."
        )
    _check_base(recipe, lm)
    _check_lengths(recipe, lm.config)
    canvas_len = recipe.noise.canvas_len or lm.config.canvas_len
    rows = (recipe.micro_batch or recipe.batch) * recipe.noise.canvases
    device = lm.device if mesh is None else check_device(recipe.device)
    execution = training_execution(recipe, lm.config, device)
    if recipe.train == "lora":
        # Factors in float32 are their own master weights; products run in the model's dtype in any case.
        stack = attach(lm.transformer, recipe.lora, seed=recipe.seed, dtype=torch.float32, device=device)
        trained = lora_parameters(stack)
        for module in stack.modules():  # copies of the adapted stack: the base itself is unchanged
            if isinstance(module, QuantizedWeight):
                module.rounds_activations = False  # gradients ignore rounding, so the forward must not round
    else:
        stack = lm.transformer
        trained = choose_trained(stack, recipe.freeze)
    stack = stack.with_execution(execution)
    if mesh is not None:
        assert source is not None
        divide(stack, mesh)
        read_own_rows(stack, source, device)
        trained = {name: stack.get_parameter(name) for name in trained}  # the divided ones
    lm = lm.with_transformer(stack)
    if recipe.compile:
        compile_layers(lm)
    return TrainingSetup(
        lm=lm,
        trained=trained,
        stream=open_stream(recipe.data, lm, recipe.seed, progress),
        held_out=None
        if recipe.held_out is None
        else open_stream(recipe.held_out.data, lm, recipe.seed, progress),
        canvases=CanvasSettings(
            canvas_len=canvas_len,
            vocab_size=lm.config.vocab_size,
            fill_token=fill_token(lm),
            seed=recipe.seed,
            self_conditioning=recipe.noise.self_conditioning,
            guesses=recipe.noise.guesses,
            pad_to=_pad_to(recipe),
            pack_to=recipe.data.packed_length or 0,
            pad_packed_to=_PAD_PACKED if recipe.compile else 1,
            pad_chosen_to=_PAD_CHOSEN if recipe.compile else 1,
            pad_guessed_to=-(-rows // _GUESSED_SIZES) if recipe.compile else 1,
            per_example=recipe.noise.canvases,
            # Without an encoder loss the encoder only needs to read the context.
            encode_answers=recipe.noise.encoder_weight > 0,
            noise_power=recipe.noise.power,
            shifted=recipe.noise.shifted,
            runs=recipe.noise.runs,
            visits=0 if recipe.objective == "denoise" else recipe.rollout.steps,
            states=recipe.rollout.states,
        ),
        sampler=None if recipe.objective == "denoise" else _sampler(recipe, lm),
        teacher=_teacher(recipe, lm),
    )


def _sampler(recipe: Recipe, lm: LanguageModel) -> Sampler:
    return make_sampler(GenerationParams.make(lm.generation_defaults, **recipe.rollout.sampling))


def _teacher(recipe: Recipe, lm: LanguageModel) -> Transformer | None:
    """The model that the run begins with: of a resumed run, too, since states are restored later."""
    if recipe.objective != "distill" or recipe.rollout.target == "data":
        return None
    return copy.deepcopy(lm.transformer).requires_grad_(False)


_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def training_execution(recipe: Recipe, config: ModelConfig, device: torch.device) -> Execution:
    """The execution for this device: small experts in blocks, short texts with explicit attention."""
    plain = default_execution(device, DTYPES[recipe.precision])
    on_cpu = device.type == "cpu"
    read_at_once = recipe.data.packed_length or recipe.data.max_length
    small = 2 * config.expert_size * config.hidden_size <= MAX_BLOCK_WEIGHTS
    return Execution(
        grouped_experts=plain.grouped_experts,
        expert_block=EXPERT_BLOCK if on_cpu and small else None,
        # In float32 torch's fused attention is as fast, also backwards, and has no scores to keep.
        explicit_attention=on_cpu and recipe.precision == "bf16" and read_at_once <= MAX_EXPLICIT_TOKENS,
        recompute_layers=recipe.recompute,
    )


def compile_layers(lm: LanguageModel) -> None:
    """Compile each layer alone: one small graph per layer kind and pass mode, whatever the depth."""
    execution = lm.transformer.execution
    if lm.dtype == torch.float32 and execution.expert_block is None:
        raise InputError.about(
            "compile",
            "is on with precision 'fp32', and torch cannot trace large experts in float32; use "
            "precision: bf16, or compile: false.",
        )
    from torch._dynamo import config

    # Two kinds of layers, each with graphs for encoding (several lengths), for denoising with gradients, and
    # for denoising without them (a quarter of the rows or more).
    config.recompile_limit = max(config.recompile_limit, 32)
    if lm.device.type == "cpu":
        disable_slp_vectorizer()
    for layer in lm.transformer.layers:
        layer.compile(dynamic=False)


def disable_slp_vectorizer() -> None:
    """Switch off GCC's SLP vectorizer for torch's compiled CPU kernels, which are vectorized already.

    GCC 12 with -O3 miscompiles the transposed 32 x 32 bf16 tiles of the backward pass where a head has 64
    dimensions or more: gradients are wrong or not finite. torch has no setting for extra compiler flags, so
    this appends the flag to a setting that torch passes to the compiler unchanged.
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
    """`open_stream` without the model's weights: with the tokenizer files of the checkpoint at `path`."""
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer(path) else None
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
        ignored_keys=recipe.ignored_keys,
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
    # Whole examples are all padded to one length. Contexts differ more in length, so they get a few lengths.
    is_whole = recipe.noise.encoder_weight > 0 and recipe.data.packed_length is None
    parts = 1 if is_whole else _CONTEXT_LENGTHS
    return -(-recipe.data.max_length // parts)


def _check_base(recipe: Recipe, lm: LanguageModel) -> None:
    """Refuse to train or to compile a quantized base: it is frozen, and its products are not traced."""
    if not any(isinstance(module, QuantizedWeight) for module in lm.transformer.modules()):
        return
    if recipe.train != "lora":
        raise InputError.about(
            "train", f"is {recipe.train!r}, but the model is quantized; only an adapter can be trained."
        )
    if recipe.compile:
        raise InputError.about(
            "compile", "is on, but the model is quantized, and its products are not traced; turn it off."
        )


def _check_lengths(recipe: Recipe, config: ModelConfig) -> None:
    canvas_len = recipe.noise.canvas_len or config.canvas_len
    if recipe.data.max_length + canvas_len > config.max_positions:
        raise InputError.about(
            "data.max_length",
            f"is {recipe.data.max_length}; this model's {config.max_positions} positions leave "
            f"{config.max_positions - canvas_len} before a last canvas. Lower it.",
        )


def fill_token(lm: LanguageModel) -> int:
    """The token that fills a canvas after the end of a response: eos, which ends generation."""
    if lm.has_tokenizer and lm.tokenizer.eos_id is not None:
        return lm.tokenizer.eos_id
    return lm.generation_defaults.end_tokens[0]
