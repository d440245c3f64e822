"""What `generate` and `chat` share: options, loading, and showing one answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dgemma.cli.live_view import LiveView, PlainView, open_view
from dgemma.cli.progress import byte_progress, print_line
from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Event, Finish
from dgemma.params import PRESETS, GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="the same seed gives the same text (default: drawn)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to write (default: 1024)")
    parser.add_argument("--preset", choices=PRESETS, help="a trade of speed for care")
    parser.add_argument(
        "--max-denoising-steps", type=int, metavar="N", help="most steps per canvas (default: 48)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest (default: 1)")
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="return what there is after so many seconds"
    )
    parser.add_argument(
        "--decode", choices=("diffuse", "causal", "auto"), help="whole canvases, or left to right"
    )
    parser.add_argument(
        "--acceptance",
        choices=("entropy_bound", "confidence", "fixed"),
        help="which draws of a step are kept (default: entropy_bound)",
    )
    parser.add_argument("--stop", action="append", metavar="STRING", help="ends the answer; may be repeated")
    parser.add_argument("--system", metavar="TEXT", help="how the model shall behave")
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    parser.add_argument("--stats", action="store_true", help="tokens, seconds and steps, to stderr")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default: auto)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of this model (default: none)")
    parser.add_argument("--exact", action="store_true", help="the same bits in any batch (slower)")
    parser.add_argument(
        "--compile", action="store_true", help="fuse the vocabulary end (loading takes seconds more)"
    )


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, checked here: before a large model is loaded for nothing."""
    options = {
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "max_denoising_steps": args.max_denoising_steps,
        "temperature": args.temperature,
        "deadline_s": args.deadline,
        "decode": args.decode,
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


def open_answer_view(lm: LanguageModel, options: dict[str, Any]) -> LiveView | PlainView:
    params = GenerationParams.make(lm.generation_defaults, **options)
    return open_view(lm.pieces, params.max_denoising_steps)


def check_text(text: str) -> str:
    """Text that a tokenizer knows. Python carries bytes it could not decode as lone surrogates: they are
    UTF-8 after all (a terminal without a locale), or refused."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        good = next(at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff")
        raise InputError(
            f"the text holds bytes that are not UTF-8, after {text[:good][-20:]!r}; "
            "convert it first, for example with iconv."
        ) from None


def keep_undecodable_input() -> None:
    """Let bad bytes of stdin reach `check_text`, which can say what is wrong, and where."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")


def load_model(args: argparse.Namespace) -> LanguageModel:
    return load_with_progress(
        args.model,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
        compile=args.compile,
        adapter=args.adapter,
    )


def load_with_progress(
    model: str, *, say: Callable[[str], None] = print_line, **options: Any
) -> LanguageModel:
    """`dgemma.load`; where there is no terminal, `say` takes a line now and then."""
    import dgemma

    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        seen = 0

        def progress(done: int, total: int) -> None:
            nonlocal advance, seen
            if advance is None:
                advance = stack.enter_context(byte_progress("loading", total, say))
            advance(done - seen)
            seen = done

        return dgemma.load(model, **options, progress=progress)


def show_answer(
    view: LiveView | PlainView, start: Callable[[], Iterator[Event]]
) -> tuple[str, Answer | None]:
    """Show an answer as it is written -> (its final text, the answer, or None if Ctrl-C ended it)."""
    text, answer = "", None
    try:
        with view:
            for event in start():
                if isinstance(event, Commit):
                    text += event.text
                elif isinstance(event, Finish):
                    answer = event.answer
                view.show(event)
    except KeyboardInterrupt:
        pass
    return text, answer


def stats(answer: Answer) -> str:
    timings = answer.timings
    rows = {
        "tokens": f"{len(answer.tokens)} after a prompt of {answer.prompt_tokens}",
        "seconds": f"{timings.total_s:.2f}, first text after {timings.first_commit_s:.2f}",
        "tokens/s": f"{answer.tokens_per_second:.1f}",
        "steps per canvas": ", ".join(map(str, answer.steps)) or "none, written left to right",
        "tokens per forward": f"{answer.tokens_per_forward:.2f}",
        "finish": str(answer.finish_reason),
        "seed": str(answer.seed),
    }
    return "\n".join(f"{name:<20}{value}" for name, value in rows.items())
