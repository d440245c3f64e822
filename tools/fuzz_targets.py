"""What `tools.fuzz` sends random bytes to: an entry point for each kind of input that strangers make.

A target is made once and is then called with many inputs. What it refuses, it refuses with a `DgemmaError`.
Files are written as the real entry point reads them; weights are holes of the right length.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # the good and the hostile examples are those of the tests

_OPENED: list[object] = []


class SlowError(BaseException):
    """An input took more processor time than its limit. No `except Exception` holds it back."""


@dataclass(frozen=True, kw_only=True)
class Target:
    run: Callable[[bytes], object]
    seeds: Iterable[bytes]
    max_bytes: int = 16_384  # of one input
    seconds: float = 2.0  # of the processor, for one input


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")  # what is no UTF-8 becomes halves of characters


def padded(path: Path, head: bytes, size: int) -> None:
    """A file that begins so, and is holes up to `size`."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(max(size, len(head)))


# --- files of a checkpoint


def tiny_model(scratch: Path) -> Path:
    from dgemma.checkpoint.presets import PRESETS
    from dgemma.checkpoint.random_weights import write_random

    write_random(scratch / "model", PRESETS["tiny"].config)
    return scratch / "model"


def safetensors(scratch: Path) -> Target:
    """A header, to which length and tensors are added; or, where it begins with no brace, a whole file."""
    from dgemma.checkpoint.source import open_checkpoint

    model = tiny_model(scratch)
    file = model / "model.safetensors"
    good = file.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")

    def run(data: bytes) -> object:
        if data[:1] == b"{":
            padded(file, len(data).to_bytes(8, "little") + data, 8 + len(data) + len(good) - end)
        else:
            padded(file, data, 0)
        return open_checkpoint(model)

    small = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"__metadata__":{}}'
    whole = len(small).to_bytes(8, "little") + small + bytes(24)
    return Target(run=run, seeds=[good[8:end], small, whole, bytes(8)], max_bytes=65_536)


def config(scratch: Path) -> Target:
    """`config.json`, and behind two zeros `generation_config.json`."""
    from dgemma.checkpoint.source import open_checkpoint, read_generation_config
    from dgemma.params import GenerationParams

    model = tiny_model(scratch)
    first, second = (model / name for name in ("config.json", "generation_config.json"))
    good = [first.read_bytes(), second.read_bytes()]

    def run(data: bytes) -> object:
        before, _, after = data.partition(b"\0\0")
        first.write_bytes(before)
        second.write_bytes(after or good[1])
        open_checkpoint(model)
        return GenerationParams.from_generation_config(read_generation_config(model) or {})

    compact = [json.dumps(json.loads(text)).encode() for text in good]
    return Target(run=run, seeds=[*good, b"\0\0".join(good), b"\0\0".join(compact), b"{}"])


def adapter(scratch: Path) -> Target:
    """`adapter_config.json`, and behind two zeros the header of its weights."""
    import dgemma
    from adapters import SETTINGS, train
    from dgemma.checkpoint.adapter_source import open_adapter

    base = dgemma.load(tiny_model(scratch))
    path = scratch / "adapter"
    train(base.with_adapter(SETTINGS), seed=1, size=1.0).save_adapter(path)
    first, second = path / "adapter_config.json", path / "adapter_model.safetensors"
    good = second.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")

    def run(data: bytes) -> object:
        before, _, after = data.partition(b"\0\0")
        first.write_bytes(before)
        header = after or good[8:end]
        padded(second, len(header).to_bytes(8, "little") + header, 8 + len(header) + len(good) - end)
        return open_adapter(path, base.config)

    settings = first.read_bytes()
    return Target(run=run, seeds=[settings, settings + b"\0\0" + good[8:end], b"{}"], max_bytes=65_536)


def mlx(scratch: Path) -> Target:
    """`config.json` of a checkpoint that mlx-vlm quantized."""
    from dgemma.checkpoint.export import write_export
    from dgemma.checkpoint.mlx_export import plan_mlx
    from dgemma.checkpoint.random_weights import write_random
    from dgemma.checkpoint.source import open_checkpoint
    from gguf_files import tiny_config

    model = scratch / "mlx"
    write_random(scratch / "plain", tiny_config())
    write_export(model, plan_mlx(open_checkpoint(scratch / "plain"), name="4bit"))
    file = model / "config.json"
    good = file.read_bytes()

    def run(data: bytes) -> object:
        file.write_bytes(data)
        return open_checkpoint(model)

    return Target(run=run, seeds=[good, json.dumps(json.loads(good)).encode()])


def gguf(scratch: Path) -> Target:
    """The beginning of a GGUF file. Its tensors are holes."""
    from dgemma.checkpoint.source import open_checkpoint
    from dgemma.gguf_file import read_gguf
    from dgemma.text.tokenizer import Tokenizer, has_tokenizer
    from gguf_files import data_of, metadata_of, tiny_config, type_by_part, write_gguf
    from test_gguf_file import good as good_bytes

    path = scratch / "model.gguf"
    geometry = tiny_config()
    data, _ = data_of(geometry, type_by_part("Q4_0"))
    write_gguf(path, data, {**metadata_of(geometry), "tokenizer.huggingface.json": small_tokenizer()})
    good = path.read_bytes()
    places = sorted((tensor.start, tensor.nbytes) for tensor in read_gguf(path).tensors.values())
    (begin, _), (last, _) = places[0], places[-1]  # the last ones are read: factors of frequencies
    head = good[:begin]

    def run(data: bytes) -> object:
        if len(data) < 1000:
            path.write_bytes(data)
        else:
            start = len(data) + -len(data) % 32
            padded(path, data, start + last - begin)
            with path.open("ab") as file:
                file.write(good[last:])
        source = open_checkpoint(path)
        return Tokenizer.from_directory(path) if has_tokenizer(path) else source

    return Target(run=run, seeds=[head, bytes(good_bytes().data)], max_bytes=len(head) + 4096)


def small_tokenizer() -> str:
    """`tokenizer.json` with bytes, single characters and a few control tokens."""
    from text.bundled import DIRECTORY

    whole = json.loads((DIRECTORY / "tokenizer.json").read_text())
    known = whole["model"]["vocab"].items()
    vocab = {token: id_ for token, id_ in known if len(token) == 1 or token.startswith("<0x")}
    added = [token for token in whole["added_tokens"] if token["id"] < 300][:8]
    vocab |= {token["content"]: token["id"] for token in added}
    return json.dumps(
        {**whole, "added_tokens": added, "model": {**whole["model"], "vocab": vocab, "merges": []}}
    )


def tokenizer(scratch: Path) -> Target:
    """`tokenizer.json`, and a text that is encoded and decoded with it."""
    from dgemma.text.tokenizer import Tokenizer

    file = scratch / "tokenizer.json"

    def run(data: bytes) -> object:
        file.write_bytes(data)
        found = Tokenizer.from_directory(scratch)
        return found.decode(found.encode("Hello, <|turn>\n\n wörld \U0001f600"))

    return Target(run=run, seeds=[small_tokenizer().encode(), b"{}"], max_bytes=65_536)


def template(scratch: Path) -> Target:
    """A chat template, rendered for a chat with tools. It runs here; if slow, in the real process."""
    from dgemma.text import chat_template, template_worker
    from dgemma.text.template_process import TemplateProcess
    from text.bundled import RICH_TEMPLATE, TOKENIZER

    class Here(TemplateProcess):
        def exchange(self, request: bytes, is_last: Callable[[bytes], bool] = lambda _: False) -> bytes | int:
            try:
                return template_worker._reply(request)
            except SlowError:  # the process has a limit of its own, and ends
                return super().exchange(request, is_last)

    chat_template.TEMPLATES = Here()
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": " Be short. "},
        {"role": "user", "content": "a <|turn> b"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "y"]}}}]},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "1"},
    ]  # fmt: skip

    def run(data: bytes) -> object:
        made = chat_template.ChatTemplate(text_of(data), TOKENIZER)
        return made.render(chat, tools=[tool], enable_thinking=True)

    pieces = [
        "{% for m in messages %}{{ m.role|upper }}{{ m['content'][::-1] }}{% endfor %}",
        "{{ '<|turn>' ~ messages[0].content|trim|tojson }}{% set x = namespace(a=1) %}{% set x.a = 2 %}",
        "{% macro f(a, b=1) %}{{ a }}{% if b %}{{ f(a, b - 1) }}{% endif %}{% endmacro %}{{ f('x', 9) }}",
        "{{ range(9)|map('string')|join(',') }}{{ '%s %d'|format('a', 3) }}{{ (7 ** 3)|string * 3 }}",
        "{{ raise_exception('no') }}{{ strftime_now('%Y') }}{% call f() %}{% endcall %}{{ ''.__class__ }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ tools[0]|tojson(indent=2) }}",
    ]
    return Target(
        run=run, seeds=[RICH_TEMPLATE.encode(), *(piece.encode() for piece in pieces)], max_bytes=4096
    )


# --- files of others


def trace(scratch: Path) -> Target:
    """A trace file, packed or not: read, drawn, counted and compared."""
    import dgemma
    from dgemma.trace.compare import compare
    from dgemma.trace.frames import make_frames
    from dgemma.trace.html import to_html
    from dgemma.trace.stats import trace_stats
    from dgemma.trace.svg import chosen_frames, to_svg
    from dgemma.trace.trace_reader import read_trace
    from dgemma.trace.trace_writer import trace_bytes
    from recorded_calls import random_call
    from server.real_server import write_model

    path = scratch / "some.trace"
    lm = dgemma.load(write_model(scratch / "model"))
    seeds = []
    for number in range(6):
        with lm.record("fuzz") as recorder:
            random_call(lm, random.Random(number))
        seeds.append(gzip.decompress(trace_bytes(recorder.trace())))

    def run(data: bytes) -> object:
        path.write_bytes(data)
        found = read_trace(path)
        for request in found.requests:
            to_svg(chosen_frames(make_frames(found, request), 3))
        return compare(found, found), to_html(found), trace_stats([found])

    return Target(run=run, seeds=[*seeds, gzip.compress(seeds[0])], max_bytes=32_768)


def batch(scratch: Path) -> Target:
    """A batch's file of requests, and behind two zeros its file of results."""
    from dgemma.server.batch.protocol import BatchRequests, BatchResults

    first, second = scratch / "requests.jsonl", scratch / "results.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    result = {
        "id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}},
        "error": None,
    }  # fmt: skip

    def run(data: bytes) -> object:
        before, _, after = data.partition(b"\0\0")
        first.write_bytes(before)
        second.write_bytes(after)
        requests = BatchRequests(first, max_line_bytes=4096)
        with BatchResults(second, requests.ids) as results:
            return results

    seeds = [
        json.dumps(line).encode() + b"\n",
        b"\0\0".join(json.dumps(x).encode() + b"\n" for x in (line, result)),
    ]
    return Target(run=run, seeds=seeds)


def image(scratch: Path) -> Target:
    """An image file, decoded and cut into patches. It runs here, and again in the real process if slow."""
    from PIL import Image

    from dgemma.errors import InputError
    from dgemma.images.decode import ImageLimits, decode_image
    from dgemma.images.preprocess import ImageSettings, cut_patches
    from dgemma.images.process import IMAGES
    from images.hostile import encoded

    limits = ImageLimits(max_pixels=1 << 20)
    settings = ImageSettings(max_tokens=70)

    def run(data: bytes) -> object:
        try:
            return cut_patches(decode_image(data, limits=limits), settings)
        except SlowError:
            return IMAGES.patches(data, settings, limits)
        except MemoryError:
            raise InputError("more memory than the process of images has") from None

    picture = Image.effect_mandelbrot((24, 16), (-2, -1, 1, 1), 20)
    colour = picture.convert("RGB")
    seeds = [encoded(colour, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    seeds += [encoded(picture.convert(mode), "PNG") for mode in ("1", "L", "P", "LA", "RGBA")]
    seeds += [encoded(colour, "JPEG", progressive=True), encoded(colour, "WEBP", lossless=True)]
    return Target(run=run, seeds=seeds)


# --- requests


def request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    if body:
        headers = (*headers, b"content-type: application/json", b"content-length: %d" % len(body))
    return b"\r\n".join((line + b" HTTP/1.1", b"host: localhost", *headers, b"", body))


def http(scratch: Path) -> Target:
    """Bytes of a connection to a server whose engine answers at once. What begins with / is given a head."""
    import logging

    from server.fake_engine import FakeEngine, Script
    from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, eventually, on_a_port
    from server.test_hostile_bodies import FULL, WORKS

    logging.getLogger("dgemma.server").setLevel(logging.CRITICAL)
    engine = FakeEngine(Script(text="Yes."))
    opened = on_a_port(app_of(engine, max_body_bytes=50_000, request_timeout_s=1.0, max_choices=4))
    _OPENED.append(opened)  # else it is closed with the last reference
    host, _, port = opened.__enter__().removeprefix("http://").rpartition(":")

    def is_listening() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return True
        return False

    eventually(is_listening)

    def exchanged(data: bytes, *, is_whole: bool) -> bytes:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            parts = []
            try:
                connection.sendall(data)
                if not is_whole:  # the server takes it for the end of the client, and waits no longer
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65_536):
                    parts.append(part)
            except ConnectionError:  # refused before its end
                pass
            return b"".join(parts)

    def run(data: bytes) -> object:
        if is_whole := data[:1] == b"/":
            path, _, body = data.partition(b"\n")
            data = request(b"POST " + path.replace(b"\r", b""), b"connection: close", body=body or b" ")
        reply = exchanged(data, is_whole=is_whole)
        if reply[:10] in (b"HTTP/1.1 5", b"HTTP/1.0 5") and reply[9:12] != b"503":
            raise AssertionError(reply[-600:])
        return reply

    constrained = {"type": "json_schema", "json_schema": {"schema": True}}
    bodies: list[tuple[str, Any]] = [
        (CHAT, HELLO), (CHAT, FULL), (COMPLETIONS, ONCE), (CHAT, {**HELLO, "response_format": constrained}),
        ("/tokenize", {"model": "m", "prompt": "a"}), ("/detokenize", {"model": "dgemma", "tokens": [5]}),
        *WORKS,
    ]  # fmt: skip
    seeds = [path.encode() + b"\n" + json.dumps(body).encode() for path, body in bodies]
    pages = ("", "health", "ready", "metrics", "v1/models", "openapi.json", "docs", "v1/responses/x")
    seeds += [request(b"GET /" + page.encode()) for page in pages]
    chunks = b"2\r\n{}\r\n0\r\n\r\n"
    seeds += [
        request(b"POST /v1/chat/completions", body=json.dumps(HELLO).encode()),
        request(b"POST /v1/completions", b"content-type: application/json", b"transfer-encoding: chunked")
        + chunks,
        request(b"DELETE /v1/responses/x", b"authorization: Bearer x"),
        request(b"OPTIONS /", b"origin: http://a", b"expect: 100-continue", b"upgrade: websocket"),
    ]
    # An edit passes over its text several times: 0.3 s for 100 characters, five times that with coverage.
    return Target(run=run, seeds=seeds, max_bytes=8192, seconds=8.0)


def compiling(make: Callable[[str], Any]) -> Callable[[bytes], object]:
    """Compile as a server does, with a tenth of its time, so that an input is not slow by right."""
    from dgemma.structured_output import compiler
    from text.bundled import TOKENIZER

    ends = (TOKENIZER.controls["<eos>"],)
    grammars = compiler.GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, ends)
    grammars.compile(make("true"))  # with the vocabulary's trie

    def run(data: bytes) -> object:
        grammars._cache.clear()
        with mock.patch.object(compiler, "DEFAULT_SECONDS", 0.45):  # not for others in this process
            return grammars.compile(make(text_of(data)))

    return run


def schema(scratch: Path) -> Target:
    """A JSON schema, as the text of a request's field."""
    from dgemma.structured_output.response_format import JsonFormat, schema_text

    known = (ROOT / "tests/data/json_schemas.jsonl").read_text().strip().split("\n")
    seeds = [json.dumps(json.loads(line)["schema"]).encode() for line in known]
    return Target(run=compiling(lambda text: JsonFormat(schema_text(text))), seeds=seeds, max_bytes=4096)


def regex(scratch: Path) -> Target:
    """A regular expression."""
    from dgemma.structured_output.response_format import RegexFormat

    patterns = [
        r"[a-z ]{5,40}", r"[0-9]{4}-[0-9]{2}", r"(open|read|close)\([a-z]+\)", r"(a|b)*?c+", r"\d+\.\d{1,3}",
        r'[^\x00-\x1f"\\]*', r"\w+@\w+\.(com|org)", r"(?i:yes|no)", r"\p{L}+", r"^a$", r"(?=a)b", r"(a)\1",
        r"[\u4e00-\u9fff]{2}", r".{3}", r"a{2,}", r"\bword\b", r"[[:alpha:]]", r"(?P<n>x)", r"\\\n\t\x41",
    ]  # fmt: skip
    return Target(run=compiling(RegexFormat), seeds=[one.encode() for one in patterns], max_bytes=512)


TARGETS: dict[str, Callable[[Path], Target]] = {
    made.__name__: made
    for made in (
        safetensors, config, template, trace, gguf, image, http, schema, regex,
        tokenizer, adapter, mlx, batch,
    )
}  # fmt: skip
