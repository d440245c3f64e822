"""Options of `serve` and `run-batch`: a flag and an environment variable each, and opening the engine.

The flag overrides the variable; an empty variable counts as unset. What needs no weights is checked before
the model is loaded.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dgemma.cli.options import load_with_progress, thread_count
from dgemma.cli.views.progress import print_line
from dgemma.errors import InputError, suggestion
from dgemma.server.http.settings import (
    LOG_FORMATS,
    ROUTINGS,
    Adapter,
    Default,
    LoadOptions,
    Settings,
    is_usable_name,
)
from dgemma.tasks.calibration import Calibration

if TYPE_CHECKING:
    from dgemma.engine.async_engine import AsyncEngine
    from dgemma.server.text import CheckpointText


def require_server_packages() -> None:
    try:
        for name in ("fastapi", "uvicorn"):
            importlib.import_module(name)
    except ImportError:
        raise InputError("the server needs FastAPI and uvicorn; run: pip install 'dgemma[server]'") from None


def served_name(model: str) -> str:
    """The name clients send as `model`, unless --served-model-name sets another."""
    name = Path(model).name
    return name if is_usable_name(name) else "dgemma"


def check_fit(model: str, settings: Settings) -> None:
    """Refuse lengths and adapters that do not fit the model before a large model is loaded."""
    if not settings.adapters and settings.max_model_len is None and settings.canvas_length is None:
        return
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.source import read_config

    _, config = read_config(resolve(model))
    context = settings.max_model_len or config.max_positions
    canvas = settings.canvas_length or config.canvas_len
    if context > config.max_positions:
        raise InputError(
            f"--max-model-len is {context}; this model's context ends at {config.max_positions} tokens."
        )
    if context <= canvas:
        raise InputError(
            f"a context of {context} tokens has no space for a prompt and a canvas of {canvas}. "
            f"Give --max-model-len above {canvas}, or a smaller --canvas-length."
        )
    for adapter in settings.adapters:
        open_adapter(adapter.path, config)


def open_service(
    model: str,
    options: LoadOptions,
    settings: Settings,
    *,
    queue_len: int,
    log: Callable[[str], None] = print_line,
    **load_options: Any,
) -> tuple[AsyncEngine, CheckpointText]:
    from dgemma.service import open_engine_of, text_of

    lm = load_with_progress(
        model,
        log=log,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        exact=options.exact,
        compile=options.compile,
        **load_options,
    )
    engine = open_engine_of(lm, options, settings, queue_len=queue_len)
    return engine, text_of(lm, engine.model)


Kind = TypeVar("Kind", Settings, LoadOptions)


@dataclass(frozen=True)
class Flag:
    """One setting: its flag and its environment variable."""

    name: str
    field: str  # of Settings or LoadOptions
    read: Callable[[str], Any]  # bool: a switch, --name and --no-name
    metavar: str
    help: str
    is_list: bool = False  # may be repeated; the variable has commas
    choices: tuple[str, ...] = ()
    unset: str = ""  # what the default is called, where it is no value
    in_batch: bool = False  # a batch has it too
    is_secret: bool = False  # only a variable: a process list shows flags

    @property
    def variable(self) -> str:
        return "DGEMMA_" + self.name.removeprefix("--").replace("-", "_").upper()


def _calibration(text: str) -> Path:
    """Read here: before a large model is loaded for nothing."""
    Calibration.load(text)
    return Path(text)


def _threads(text: str) -> int | None:
    try:
        return thread_count(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{error}.") from None


SERVER_FLAGS = (
    Flag("--host", "host", str, "ADDRESS", "where to listen; the default is this machine only"),
    Flag("--port", "port", int, "N", "0: any free one, which the log names"),
    Flag("--api-key", "api_keys", str, "KEY", "clients must send one of these",
         is_list=True, unset="none", is_secret=True),
    Flag("--api-key-file", "api_key_file", Path, "FILE",
         "lines of NAME KEY [limit=value ...]; read again when it changes. [DGEMMA_API_KEY] holds keys too",
         unset="none"),
    Flag("--tls-cert", "tls_cert", Path, "FILE", "a certificate in PEM: serve HTTPS", unset="none"),
    Flag("--tls-key", "tls_key", Path, "FILE", "its private key", unset="in the same file"),
    Flag("--allowed-host", "allowed_hosts", str, "NAME", "a Host header's name besides this machine's",
         is_list=True, unset="none"),
    Flag("--cors-origin", "cors_origins", str, "URL", "web pages that may send requests; *: all",
         is_list=True, unset="none"),
    Flag("--served-model-name", "served_model_name", str, "NAME", "the name clients send as model",
         unset="the last part of MODEL", in_batch=True),
    Flag("--adapter", "adapters", Adapter.parse, "NAME=PATH", "a LoRA adapter by its name; may be repeated",
         is_list=True, unset="none", in_batch=True),
    Flag("--default", "defaults", Default.parse, "NAME=VALUE",
         "an option of requests that do not give it: of the sampler, or thinking=true; may be repeated",
         is_list=True, unset="the checkpoint's", in_batch=True),
    Flag("--calibration", "calibration", _calibration, "FILE", "of decisions, made by dgemma decide --fit",
         unset="none", in_batch=True),
    Flag("--max-model-len", "max_model_len", int, "N", "tokens of prompt and answer",
         unset="the checkpoint's", in_batch=True),
    Flag("--memory-fraction", "memory_fraction", float, "F", "of the memory to use", in_batch=True),
    Flag("--canvas-length", "canvas_length", int, "N", "tokens per canvas",
         unset="the checkpoint's", in_batch=True),
    Flag("--max-num-seqs", "max_num_seqs", int, "N", "answers written at once", in_batch=True),
    Flag("--prefill-chunk", "prefill_chunk", int, "N", "prompt tokens read in one go", in_batch=True),
    Flag("--replicas", "replicas", int, "N",
         "engines, each with the whole model, behind one server, by Ray Serve (dgemma[ray])"),
    Flag("--max-replicas", "max_replicas", int, "N", "started while the load needs them",
         unset="as many as --replicas"),
    Flag("--routing", "routing", str, "R", "prefix: to the replica that has the prompt's beginning; or load",
         choices=ROUTINGS),
    Flag("--tensor-parallel", "tensor_parallel", int, "N",
         "processes that compute the model together, each with a part of its weights"),
    Flag("--queue-len", "queue_len", int, "N", "requests that may wait"),
    Flag("--share-prefixes", "share_prefixes", bool, "", "one prefix cache for clients of all API keys"),
    Flag("--traces", "traces", bool, "", "clients may ask for every step of their canvases"),
    Flag("--playground", "playground", bool, "", "a page at / for browsers; it shows canvases with --traces"),
    Flag("--step-timeout", "step_timeout_s", float, "SECONDS",
         "a step that takes longer restarts the engine"),
    Flag("--requests-per-minute", "requests_per_minute", float, "N", "of one API key", unset="no limit"),
    Flag("--tokens-per-minute", "tokens_per_minute", float, "N", "of one API key", unset="no limit"),
    Flag("--max-key-seqs", "max_key_seqs", int, "N", "answers written at once for one API key",
         unset="no limit"),
    Flag("--compile-seconds-per-minute", "compile_seconds_per_minute", float, "SECONDS",
         "of one API key, for response formats", unset="no limit"),
    Flag("--compile-timeout", "compile_timeout_s", float, "SECONDS", "for one response format",
         in_batch=True),
    Flag("--max-stored-responses", "max_stored_responses", int, "N", "kept in memory; 0: none"),
    Flag("--max-stored-bytes", "max_stored_bytes", int, "N", "of all responses that are kept"),
    Flag("--max-buffered-bytes", "max_buffered_bytes", int, "N", "of all bodies that are arriving"),
    Flag("--max-connections", "max_connections", int, "N",
         "open at once; above it the oldest without a request is closed"),
    Flag("--header-timeout", "header_timeout_s", float, "SECONDS", "for the head of a request to arrive"),
    Flag("--max-header-bytes", "max_header_bytes", int, "N", "of the head of a request"),
    Flag("--send-timeout", "send_timeout_s", float, "SECONDS", "for a client to take in what is sent"),
    Flag("--max-body-bytes", "max_body_bytes", int, "N", "of one request", in_batch=True),
    Flag("--max-prompt-tokens", "max_prompt_tokens", int, "N", "of one prompt",
         unset="what fits", in_batch=True),
    Flag("--max-images", "max_images", int, "N", "of one request", in_batch=True),
    Flag("--max-image-bytes", "max_image_bytes", int, "N", "of one image, and of all in one body",
         in_batch=True),
    Flag("--max-image-pixels", "max_image_pixels", int, "N", "of one image", in_batch=True),
    Flag("--image-timeout", "image_timeout_s", float, "SECONDS", "for the images of a request to be read",
         in_batch=True),
    Flag("--allow-remote-images", "allow_remote_images", bool, "",
         "fetch images from public http and https addresses that clients name", in_batch=True),
    Flag("--max-choices", "max_choices", int, "N", "answers of one request", in_batch=True),
    Flag("--max-concurrent-requests", "max_concurrent_requests", int, "N",
         "being read, waiting or answered"),
    Flag("--request-timeout", "request_timeout_s", float, "SECONDS",
         "after that an answer ends with the text written so far", in_batch=True),
    Flag("--timeout-grace", "timeout_grace_s", float, "SECONDS",
         "for the engine to stop then; after that the request is abandoned", in_batch=True),
    Flag("--body-timeout", "body_timeout_s", float, "SECONDS", "for a body to arrive"),
    Flag("--drain-timeout", "drain_timeout_s", float, "SECONDS", "to finish after a signal"),
    Flag("--keep-alive", "keep_alive_s", float, "SECONDS", "of silence in a stream, then a comment"),
    Flag("--log-format", "log_format", str, "F", "auto: text on a terminal, else json", choices=LOG_FORMATS),
    Flag("--log-text", "log_text", bool, "", "prompts and answers in the log"),
)  # fmt: skip
BATCH_FLAGS = tuple(flag for flag in SERVER_FLAGS if flag.in_batch)
LOAD_FLAGS = (
    Flag("--dtype", "dtype", str, "D", "auto: the file's; float32 where the processor has no bfloat16",
         choices=("auto", "float32", "bfloat16")),
    Flag("--device", "device", str, "D", "auto, cpu, gpu, cuda, cuda:1, mps"),
    Flag("--threads", "threads", _threads, "N", "of the processor",
         unset="auto: cores that others do not use"),
    Flag("--exact", "exact", bool, "", "the same bits in any batch and with any number of threads (slower)"),
    Flag("--compile", "compile", bool, "", "compile the vocabulary scan (loading takes seconds more)"),
    Flag("--prefix-reuse", "reuse_prefixes", bool, "", "prefix cache: reuse the KV cache of earlier prompts"),
)  # fmt: skip
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Kind], flags: Sequence[Flag], **otherwise: Any
) -> None:
    """The flags of fields of `kind`; `otherwise` are defaults that this command has of its own."""
    defaults = {entry.name: entry.default for entry in fields(kind)} | otherwise
    for flag in flags:
        if flag.is_secret:  # taken, so that the error can name the remedy
            parser.add_argument(flag.name, dest=flag.field, action="append", help=argparse.SUPPRESS)
            continue
        # No default here, so that an option that was not given can be recognized.
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.read is not bool:
            how = {"action": "append" if flag.is_list else "store", "metavar": flag.metavar}
        if flag.choices:
            how |= {"choices": flag.choices, "metavar": "|".join(flag.choices)}
        usual = flag.unset or _shown(defaults[flag.field])
        parser.add_argument(
            flag.name,
            dest=flag.field,
            default=None,
            help=f"{flag.help} (default: {usual}) [{flag.variable}]",
            **how,
        )


def read_flags(
    kind: type[Kind],
    flags: Sequence[Flag],
    args: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    **otherwise: Any,
) -> Kind:
    """`kind` from flags and variables; an error names the flag or variable it comes from."""
    given = dict(otherwise)
    for flag in flags:
        value, origin = getattr(args, flag.field), flag.name
        if value is not None and flag.is_secret:
            raise InputError(
                f"{flag.name} would show the secret in every process list; set the variable {flag.variable}, "
                f"or give {flag.name}-file."
            )
        if value is None and environment.get(flag.variable):
            value, origin = environment[flag.variable], flag.variable
            value = value.split(",") if flag.is_list else value
        if value is None:
            continue
        if flag.is_list:
            given[flag.field] = tuple(_read(flag, origin, text) for text in value)
        else:
            given[flag.field] = value if isinstance(value, bool) else _read(flag, origin, value)
        try:
            kind(**given)  # validate after each, so that the error is attributed to the right one
        except InputError as error:
            raise InputError(f"{origin}: {error}") from None
    return kind(**given)


def _read(flag: Flag, origin: str, text: str) -> Any:
    if flag.read is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InputError(f"{origin} is {text!r}; give 1 or 0.")
        return text.lower() in _TRUE
    if flag.choices and text not in flag.choices:
        known = ", ".join(flag.choices)
        raise InputError(f"{origin} is {text!r}, not one of {known}{suggestion(text, flag.choices)}")
    try:
        return flag.read(text)
    except InputError as error:
        raise InputError(f"{origin}: {error}") from None
    except ValueError:
        kind = "a whole number" if flag.read is int else "a number"
        raise InputError(f"{origin} is {text!r}; it must be {kind}.") from None


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)
