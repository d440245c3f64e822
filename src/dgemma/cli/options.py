"""Options that several commands share: generation, response format, positional MODEL, and loading a model."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from dgemma.cli.views.progress import Notice, byte_progress, print_line
from dgemma.errors import DgemmaError, InputError
from dgemma.machine import choose_threads, sample_cpu, size_text
from dgemma.params import DECODES, PRESETS, CanvasLen, GenerationParams
from dgemma.structured_output.response_format import (
    MAX_FORMAT_CHARS,
    JsonFormat,
    RegexFormat,
    response_format_of,
    schema_text,
)

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.trace.trace import Trace


SEED_PROMISE = "the same seed gives the same text, on this machine with as many --threads; with --exact, any"


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help=f"{SEED_PROMISE} (default: drawn)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to write (default: 1024)")
    parser.add_argument(
        "--canvas-len",
        type=canvas_len,
        metavar="N",
        help="tokens of a canvas; auto: as many as the answer needs (default: the model's own)",
    )
    parser.add_argument("--preset", choices=PRESETS, help="a trade of speed for care")
    parser.add_argument(
        "--max-denoising-steps", type=int, metavar="N", help="most steps per canvas (default: 48)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0: argmax (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens, up to this probability"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="return the text written so far after this many seconds",
    )
    parser.add_argument("--decode", choices=DECODES, help="whole canvases, checked or not; or left to right")
    parser.add_argument(
        "--draft-steps", type=int, metavar="N", help="of a canvas that is checked (default: 4)"
    )
    parser.add_argument(
        "--verify-threshold", type=float, metavar="P",
        help="with --decode verified: the least causal probability of a token that is kept (default: 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance",
        choices=("entropy_bound", "confidence", "fixed"),
        help="which sampled tokens of a step are accepted (default: entropy_bound)",
    )
    parser.add_argument("--stop", action="append", metavar="STRING", help="ends the answer; may be repeated")
    parser.add_argument("--system", metavar="TEXT", help="the system text of the chat template")
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    parser.add_argument("--stats", action="store_true", help="tokens, seconds and steps, to stderr")
    add_trace_argument(parser)
    add_load_arguments(parser)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="auto: the file's; float32 where the processor has no bfloat16 (default: auto)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, gpu, cuda, cuda:1, mps (default: auto)")
    parser.add_argument(
        "--threads", type=thread_count, metavar="N",
        help="of the processor; auto: the cores that others do not use, with --seed all (default: auto)",
    )  # fmt: skip
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of the model (default: none)")
    parser.add_argument(
        "--exact", action="store_true",
        help="the same bits in any batch and with any number of threads (slower)",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="compile the vocabulary scan (loading takes seconds more)"
    )


def canvas_len(text: str) -> CanvasLen:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor auto")
    return int(text)


def thread_count(text: str) -> int | None:
    """None: to be chosen."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of threads nor auto")
    return int(text)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, checked here: before a large model is loaded."""
    options = {
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "canvas_len": args.canvas_len,
        "max_denoising_steps": args.max_denoising_steps,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "deadline_s": args.deadline,
        "decode": args.decode,
        "draft_steps": args.draft_steps,
        "verify_threshold": args.verify_threshold,
        "acceptance": args.acceptance,
        "stop": args.stop,
        "preset": args.preset,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if args.stop is not None:
        options["stop"] = [check_text(text) for text in args.stop]
    if args.system is not None:
        args.system = check_text(args.system)
    GenerationParams.make(**options)
    return options


def check_text(text: str) -> str:
    """Text that can be tokenized. Python carries undecodable bytes as lone surrogates: they are decoded as
    UTF-8 (a terminal without a locale), or refused."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        good = next(at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff")
        raise InputError(
            f"the text holds bytes that are not UTF-8, after {text[:good][-20:]!r}; "
            "convert it first, for example with iconv."
        ) from None


def keep_undecodable_input() -> None:
    """Let bad bytes of stdin reach `check_text`, whose error names the place."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")


def add_trace_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="record every step to a file, for `dgemma trace`")


@contextmanager
def recording(lm: LanguageModel, file: str | None, command: str) -> Iterator[None]:
    """Record what is generated within, if there is a file for it; also what an interrupt cut short."""
    if file is None:
        yield
        return
    with lm.record(command) as recorder:
        try:
            yield
        finally:
            _save_trace(recorder.trace(), file)


def _save_trace(trace: Trace, file: str) -> None:
    if not any(request.steps or request.commits for request in trace.requests):
        print(f"nothing was generated: {file} is not written", file=sys.stderr)
        return
    try:
        size = trace.save(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}.") from None
    print(
        f"{trace.num_steps} steps recorded, {size / 1000:.1f} kB; watch them: "
        f"dgemma trace show {shlex.quote(file)}",
        file=sys.stderr,
    )


def check_trace(args: argparse.Namespace) -> None:
    """Refuse now what could not be recorded after long work."""
    if args.trace is None:
        return
    if getattr(args, "image", None):
        raise InputError("--image cannot be recorded: a trace holds no images. Drop --trace, or --image.")
    check_output_file(args.trace, "--trace", is_replaced=True)


def check_output_file(path: str | Path, option: str, *, is_replaced: bool = False) -> None:
    """Refuse now what could not be written after long work. Nothing is written, and nothing left behind.

    is_replaced: a new file will take the place of an old one; else the old one is written into.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        mode = None
        if not file.parent.is_dir():
            raise InputError(f"{option} {path}: there is no directory {file.parent}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    why = None
    if mode is not None and stat.S_ISDIR(mode):
        why = "Is a directory"
    elif mode is not None and is_replaced and not stat.S_ISREG(mode):
        why = "it is not a regular file"
    elif mode is not None and not os.access(file, os.W_OK):
        why = "it is read-only"
    elif mode is None or is_replaced:
        try:
            with TemporaryFile(dir=file.parent):
                pass
        except OSError as error:
            why = error.strerror
    if why is not None:
        raise InputError(f"{path} cannot be written: {why}.")


def check_figure_file(path: Path) -> None:
    """Refuse now a figure of --svg that could not be drawn or written."""
    from dgemma.bench.report import check_can_draw

    check_can_draw()
    from matplotlib.backend_bases import FigureCanvasBase

    kind, kinds = path.suffix.removeprefix("."), FigureCanvasBase.get_supported_filetypes()
    if kind and kind.lower() not in kinds:
        raise InputError(f"--svg {path}: the name can end in .svg, or one of {', '.join(sorted(kinds))}.")
    check_output_file(path, "--svg")


def load_model(args: argparse.Namespace, **options: Any) -> LanguageModel:
    if "trace" in args:
        check_trace(args)
    return load_with_progress(
        args.model,
        threads=args.threads,
        all_cores=args.seed is not None,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
        compile=args.compile,
        adapter=args.adapter,
        **options,
    )


def is_helper(size: int) -> bool:
    """Whether this process is a rank of `size` that only helps: the first one answers."""
    return size > 1 and os.environ.get("RANK", "0") != "0"


@contextmanager
def joined_ranks(model: str, size: int, device: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """`dgemma.load`'s options for a model that `size` processes compute together: none for one.

    arguments: of the command, for the other processes.
    """
    if size == 1:
        yield {}
        return
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.source import read_config
    from dgemma.model.model_part import ModelPart
    from dgemma.scale.processes import joined

    ModelPart(read_config(resolve(model))[1], size=size)  # refuse what cannot be divided

    with joined(size, device, arguments, option="tensor_parallel") as mesh:
        yield {"mesh": mesh}


def check_checkpoint(model: str) -> None:
    """Refuse what is no checkpoint before torch is imported, which takes seconds; the hub is not asked."""
    from dgemma.checkpoint.hub import is_on_hub, resolve
    from dgemma.checkpoint.source import read_config
    from dgemma.gguf_file import is_gguf

    if not is_on_hub(model) and not is_gguf(path := resolve(model)):
        read_config(path)


def load_with_progress(
    model: str,
    *,
    threads: int | None = None,
    all_cores: bool = False,
    quiet: bool = False,
    log: Callable[[str], None] = print_line,
    **options: Any,
) -> LanguageModel:
    """`dgemma.load`; without a terminal, `log` receives a line every few seconds, with `quiet` nobody.

    all_cores: use them also if others are busy on them: for a text or a figure that shall not depend on that.
    """
    check_checkpoint(model)
    since = None if all_cores else sample_cpu()
    notice = None if quiet else Notice(f"loading {model} ...")
    import dgemma

    load = dgemma.load  # imports torch, which takes a second or two
    torch = sys.modules.get("torch")
    if torch is not None and (threads is not None or "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(threads or choose_threads(since))

    with ExitStack() as stack:
        if notice is None:
            return load(model, **options)
        stack.callback(notice.clear)
        advance: Callable[[int], None] | None = None
        seen = 0

        def progress(done: int, total: int) -> None:
            nonlocal advance, seen
            if advance is None:
                notice.clear()
                advance = stack.enter_context(byte_progress("loading", total, log))
            advance(done - seen)
            seen = done

        return load(model, **options, progress=progress)


def add_response_format_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("response format").add_mutually_exclusive_group()
    group.add_argument("--regex", metavar="PATTERN", help="all of it matches this regular expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat the option")
    group.add_argument(
        "--json-schema", metavar="SCHEMA", help="JSON of this schema: a file, -: stdin, or {...} itself"
    )
    group.add_argument("--json-object", action="store_true", help="a JSON object")


def response_format_options(args: argparse.Namespace, *, reads_stdin: bool) -> dict[str, Any]:
    """What was given, as the Python API takes it; checked before a large model is loaded.

    reads_stdin: it is taken, so no schema can come from there.
    """
    options: dict[str, Any] = {}
    if args.regex is not None:
        options["regex"] = check_text(args.regex)
    if args.choice is not None:
        options["choice"] = [check_text(text) for text in args.choice]
    if args.json_schema is not None:
        options["json_schema"] = read_schema(args.json_schema, reads_stdin=reads_stdin)
    if args.json_object:
        options["json_object"] = True
    check_response_format(options)
    return options


def read_schema(given: str, *, reads_stdin: bool) -> str:
    """A JSON schema: JSON text, a file, or - for stdin."""
    if given.lstrip()[:1] == "{" or given.strip() in ("true", "false"):
        return schema_text(check_text(given), "--json-schema")
    if given == "-":
        if reads_stdin:
            raise InputError("--json-schema is -, but stdin is read for something else; give a file.")
        keep_undecodable_input()
        return schema_text(check_text(sys.stdin.read(MAX_FORMAT_CHARS + 1)), "--json-schema")
    try:
        with open(given, encoding="utf-8-sig", errors="surrogateescape") as file:
            text = file.read(MAX_FORMAT_CHARS + 1)
    except (OSError, ValueError) as error:  # a name may hold what no name can
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"--json-schema: {given[:200]} cannot be read: {why}. Give a file or JSON."
        ) from None
    return schema_text(check_text(text), f"--json-schema {given[:200]}")


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a part of the answer that is given (docs/tasks.md)")
    group.add_argument(
        "--pins", metavar="JSON",
        help='fixed tokens: [{"at": 0, "text": "Yes"}], as over HTTP; or a file of it',
    )  # fmt: skip
    group.add_argument(
        "--canvas", metavar="JSON",
        help='what to start from: {"text": "...", "read_only": [[0, 20]]}, as over HTTP; or a file of it',
    )  # fmt: skip


def pin_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, as the Python API takes it; its form is checked before a large model is loaded."""
    from dgemma.tasks.pins import check_pins

    options = {
        name: _read_json(given, f"--{name}")
        for name in ("pins", "canvas")
        if (given := getattr(args, name)) is not None
    }
    check_pins(options.get("pins"), options.get("canvas"))
    return options


def _read_json(given: str, flag: str) -> Any:
    """JSON, or a file of it."""
    text, source = given, flag
    if given.lstrip()[:1] not in ("{", "[", '"'):
        source = f"{flag} {given[:200]}"
        try:
            with open(given, encoding="utf-8-sig", errors="surrogateescape") as file:
                text = file.read(MAX_FORMAT_CHARS + 1)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(f"{flag}: {given[:200]} cannot be read: {why}. Give a file or JSON.") from None
    if len(text) > MAX_FORMAT_CHARS:
        raise InputError(f"{source} has more than {MAX_FORMAT_CHARS} characters; shorten it.")
    try:
        return json.loads(check_text(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{source} is not JSON: {error}.") from None


def check_response_format(options: dict[str, Any]) -> None:
    """Refuse a pattern or schema that cannot be compiled."""
    response_format = response_format_of(options)
    try:
        if isinstance(response_format, RegexFormat):
            from dgemma.structured_output.regex import parse

            parse(response_format.pattern)
        elif isinstance(response_format, JsonFormat) and response_format.schema is not None:
            from dgemma.structured_output.json_schema.grammar import schema_grammar
            from dgemma.structured_output.json_schema.syntax import JsonSyntax

            schema_grammar(json.loads(response_format.schema), JsonSyntax())
    except InputError as error:
        flag = "--regex" if isinstance(response_format, RegexFormat) else "--json-schema"
        raise InputError(f"{flag}: {error}") from None


MODEL = "bundled:text"


def add_positionals(
    parser: argparse.ArgumentParser, usages: Sequence[str], positionals: Sequence[tuple[str, str]]
) -> None:
    """Positional arguments (metavar, help), of which the first ones may be left out."""
    parser.usage = "\n       ".join(f"%(prog)s {usage} [options]" for usage in usages)
    for number, (metavar, text) in enumerate(positionals):
        parser.add_argument(f"positional{number}", metavar=metavar, nargs="?", help=text)


def given_positionals(args: argparse.Namespace) -> list[str]:
    values = [getattr(args, name) for name in sorted(vars(args)) if name.startswith("positional")]
    return [value for value in values if value is not None]


def looks_like_a_model(text: str) -> bool:
    """Whether a positional names a model: used to find out which one is missing."""
    try:
        return text.startswith("bundled:") or (Path(text) / "config.json").is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def check_model(model: str, prompt: str | None, command: str) -> None:
    """Refuse a prompt that stands where the model should, before anybody looks for it on the hub."""
    if prompt is not None or looks_like_a_model(model):
        return
    # A name may be that of a model whose prompt comes from stdin; a sentence is none.
    is_name = re.fullmatch(r"[\w.~@:/\\-]+", model) is not None
    if not is_name or (sys.stdin.isatty() and "/" not in model and not Path(model).exists()):
        raise InputError(
            f"{model[:60]!r} was taken for MODEL, which comes first, and there is no such model. The bundled "
            f"one needs no download: dgemma {command} {MODEL} {shlex.quote(model)}"
        )


def add_model_arguments(parser: argparse.ArgumentParser, *, seed: int | None = None) -> None:
    usual = "drawn" if seed is None else str(seed)
    parser.add_argument("--seed", type=int, default=seed, help=f"{SEED_PROMISE} (default: {usual})")
    add_trace_argument(parser)
    add_load_arguments(parser)


def check_disk(out: Path, total: int, remedy: str = "Choose a smaller preset, or --config-only.") -> None:
    """Refuse a checkpoint of `total` bytes that does not fit; what an interrupted run left counts."""
    written = sum(file.stat().st_size for file in out.glob("*.safetensors")) if out.is_dir() else 0
    needed = total - written
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DgemmaError(
            f"the checkpoint needs {size_text(needed)}, {place} has {size_text(free)} free. {remedy}"
        )


def read_key_file(path: Path) -> str:
    """The key of --api-key-file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"--api-key-file {path} cannot be read: {why}.") from None
