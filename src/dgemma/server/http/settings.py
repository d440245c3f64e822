"""Settings of a server: frozen, validated once."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dgemma.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
# As browsers write it: in lower case, without a path.
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]+")
ANY_ORIGIN = "*"
LOG_FORMATS = ("auto", "text", "json")
ROUTINGS = ("prefix", "load")


def is_usable_name(name: str) -> bool:
    """Whether clients can use this as a model name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter, requested by its name in place of the model's."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> Adapter:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise InputError(f"adapter is {text!r}; give it as name=path.")
        return cls(name=name, path=Path(path))


@dataclass(frozen=True, kw_only=True)
class Default:
    """An option of requests that say nothing of it; `dgemma.server.defaults` checks it."""

    name: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Default:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"default is {text!r}; give it as name=value, such as temperature=0.7.")
        try:
            return cls(name=name, value=json.loads(value))
        except (ValueError, RecursionError):
            return cls(name=name, value=value)  # a name such as `fast`


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the model is loaded."""

    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    exact: bool = False
    compile: bool = False
    reuse_prefixes: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one server. `docs/server.md` has the flag and the environment variable of each."""

    # Where
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port, which the log names."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # never in a log
    """A client must send one of them, or one of the file; neither: no authentication."""
    api_key_file: Path | None = None
    """Keys with names and limits, one per line; read again when it changes."""
    tls_cert: Path | None = None
    """A PEM file; with it the server speaks HTTPS."""
    tls_key: Path | None = None
    """The key of the certificate; None: it stands in the same file."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a Host header may have besides those of this machine; none on a public address: any."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may send requests; `*`: all pages may, none: no page may."""

    # What
    served_model_name: str = "dgemma"
    adapters: tuple[Adapter, ...] = ()
    defaults: tuple[Default, ...] = ()
    """For requests that say nothing of an option."""
    calibration: Path | None = None
    """A file that calibrates the probabilities of decisions."""

    # For the engine
    max_model_len: int | None = None
    """Most tokens of prompt and answer; None: the checkpoint's."""
    memory_fraction: float = 0.9
    canvas_length: int | None = None
    """None: the checkpoint's."""
    max_num_seqs: int = 16
    """Answers being written at once."""
    replicas: int = 1
    """Engines, each with the whole model."""
    max_replicas: int | None = None
    """Started while the load needs them; None: their number stays."""
    routing: str = "prefix"
    """To replicas: the one with the longest prefix of the prompt, or by load alone."""
    tensor_parallel: int = 1
    """Processes that compute the model together."""
    prefill_chunk: int = 1024
    """Prompt tokens per prefill chunk."""
    queue_len: int = 256
    """Requests that may wait; one more is refused."""
    share_prefixes: bool = False
    """Whether clients of different API keys share the prefix cache."""
    traces: bool = False
    """Whether clients may ask for the trace of their request: every step of its canvases."""
    playground: bool = True
    """Whether browsers get the playground's page at /."""
    step_timeout_s: float = 120.0
    """A step that takes longer, and ten times as long as any before, restarts the engine."""

    # Limits of one request
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    """None: what leaves space for one canvas."""
    max_images: int = 16
    """Of one request."""
    max_image_bytes: int = 20 << 20
    """Of one image file, and of all that stand in one body."""
    max_image_pixels: int = 64 << 20
    """Width times height of one image."""
    image_timeout_s: float = 30.0
    """For all images of a request to be fetched and decoded."""
    allow_remote_images: bool = False
    """Whether images are fetched from the http and https addresses that clients name."""
    max_choices: int = 16
    """Most answers of one request: n, times the prompts of a completion."""
    max_concurrent_requests: int = 512
    """Requests being read, waiting or answered at once; of one API key half as many."""
    requests_per_minute: float | None = None
    """Of each API key, as are the next three, and refused where there is none; None: no limit."""
    tokens_per_minute: float | None = None
    max_key_seqs: int | None = None
    """Answers written at once for one API key."""
    compile_seconds_per_minute: float | None = None
    compile_timeout_s: float = 30.0
    """For a response format to be compiled, by the clock on the wall."""
    request_timeout_s: float = 600.0
    """An answer that takes longer ends with the text so far."""
    timeout_grace_s: float = 30.0
    """More time for the engine to return that text; after it the server responds 504."""
    body_timeout_s: float = 30.0
    """Time for a body to arrive."""
    max_buffered_bytes: int = 128 << 20
    """Of all bodies that are arriving; a body that would not fit is refused."""
    max_connections: int = 1024
    """Open connections; above it, those that wait for a request are closed, the oldest first."""
    header_timeout_s: float = 10.0
    """Time for the head of a request to arrive on an open connection."""
    max_header_bytes: int = 64 << 10
    send_timeout_s: float = 60.0
    """A client that takes in nothing for so long counts as disconnected."""

    # Responses that are kept (`store`)
    max_stored_responses: int = 1000
    """In memory; 0: none are kept."""
    max_stored_bytes: int = 64 << 20
    """Of all of them, each with the conversation it answers."""

    # Life
    drain_timeout_s: float = 120.0
    """After SIGTERM: time for accepted answers to end."""
    keep_alive_s: float = 15.0
    """A stream that is silent for so long sends a comment, so that proxies keep it open."""
    log_format: str = "auto"
    """`text`: lines for people, `json`: one object per line; `auto`: text if the log goes to a terminal."""
    log_text: bool = False
    """Prompts and answers in the log."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            whole = name not in _REAL
            good = isinstance(value, int) if whole else isinstance(value, int | float)
            if not good or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
                kind = "a whole number" if whole else "a number"
                raise InputError(
                    f"{name} is {value!r}; it must be {kind} from {_shown(low)} to {_shown(high)}."
                )
        if not self.host:
            raise InputError("host is empty; give an address such as 127.0.0.1.")
        if self.tls_key is not None and self.tls_cert is None:
            raise InputError("tls_key needs tls_cert; give the certificate too.")
        for origin in self.cors_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise InputError(
                    f"the origin {origin!r} is not one; give it as https://name or http://name:port, in "
                    "lower case and without a path, or * for all web pages."
                )
        if self.log_format not in LOG_FORMATS:
            raise InputError(f"log_format is {self.log_format!r}; give one of {', '.join(LOG_FORMATS)}.")
        if self.routing not in ROUTINGS:
            raise InputError(f"routing is {self.routing!r}; give one of {', '.join(ROUTINGS)}.")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InputError(f"max_replicas is {self.max_replicas}, less than the {self.replicas} replicas.")
        for key in self.api_keys:
            if not _KEY.fullmatch(key):
                # The key itself stays out of the message: it may end in a log.
                raise InputError("an API key is empty, too long or has spaces; give 1 to 512 visible ASCII.")
        limit = next((name for name in _OF_A_KEY if getattr(self, name) is not None), None)
        if limit is not None and not self.has_keys:
            raise InputError(
                f"{limit} is a limit of each API key, and this server has none; give it api_keys or an "
                "api_key_file."
            )
        names = [self.served_model_name, *(adapter.name for adapter in self.adapters)]
        for name in names:
            if not is_usable_name(name):
                raise InputError(f"the served name {name!r} is not usable; give letters, digits and ._:/@+-")
            if names.count(name) > 1:
                raise InputError(f"the served name {name!r} stands for two models; rename one of them.")

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65535), ("max_model_len", 1, 1 << 31), ("memory_fraction", 0.01, 1),
    ("canvas_length", 1, 1 << 16), ("max_num_seqs", 1, 1 << 16), ("tensor_parallel", 1, 64),
    ("replicas", 1, 4096), ("max_replicas", 1, 4096),
    ("prefill_chunk", 64, 1 << 20),  # the engine prefills whole blocks
    ("queue_len", 0, 1 << 20), ("max_body_bytes", 1, 1 << 30), ("max_prompt_tokens", 1, 1 << 31),
    ("max_images", 0, 1024), ("max_image_bytes", 1, 1 << 30), ("max_image_pixels", 1, 1 << 30),
    ("image_timeout_s", 0.01, 3_600),
    ("max_choices", 1, 1024), ("max_concurrent_requests", 1, 1 << 20), ("request_timeout_s", 0.01, 86_400),
    ("timeout_grace_s", 0.01, 3_600), ("step_timeout_s", 0.1, 86_400), ("requests_per_minute", 0.001, 1e9),
    ("tokens_per_minute", 0.001, 1e12), ("max_key_seqs", 1, 1 << 16),
    ("compile_seconds_per_minute", 0.001, 1e6), ("compile_timeout_s", 0.01, 3_600),
    ("max_stored_responses", 0, 1 << 31), ("max_stored_bytes", 1, 1 << 40),
    ("max_buffered_bytes", 1, 1 << 40), ("max_connections", 1, 1 << 20), ("header_timeout_s", 0.01, 3_600),
    ("max_header_bytes", 256, 1 << 24), ("send_timeout_s", 0.01, 3_600),
    ("body_timeout_s", 0.01, 3_600), ("drain_timeout_s", 0, 86_400), ("keep_alive_s", 0.01, 3_600),
)  # fmt: skip
_REAL = (
    "memory_fraction", "request_timeout_s", "timeout_grace_s", "body_timeout_s", "drain_timeout_s",
    "keep_alive_s", "step_timeout_s", "requests_per_minute", "tokens_per_minute",
    "compile_seconds_per_minute", "compile_timeout_s", "header_timeout_s", "send_timeout_s",
    "image_timeout_s",
)  # fmt: skip
_OF_A_KEY = (
    "requests_per_minute", "tokens_per_minute", "max_key_seqs", "compile_seconds_per_minute",
)  # fmt: skip
_MAY_BE_NONE = (
    "max_replicas", "max_model_len", "canvas_length", "max_prompt_tokens", *_OF_A_KEY,
)  # fmt: skip
assert {name for name, _, _ in _RANGES} < {entry.name for entry in fields(Settings)}
