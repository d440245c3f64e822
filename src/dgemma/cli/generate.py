"""Write an answer to a prompt, or continue a text.

On a terminal the canvas is shown while it settles; in a pipe only the final text is printed. The prompt is
one user turn of the checkpoint's chat template, if it has one; --raw continues the text as it is."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dgemma.cli.images import add_image_arguments, content_of, image_options, read_images
from dgemma.cli.options import (
    add_generation_arguments,
    add_pin_arguments,
    add_response_format_arguments,
    check_model,
    check_text,
    generation_options,
    is_helper,
    joined_ranks,
    keep_undecodable_input,
    load_model,
    pin_options,
    recording,
    response_format_options,
)
from dgemma.cli.views.answer_view import PlainView, open_answer_view, show_answer, stats
from dgemma.errors import InputError
from dgemma.events import Event

if TYPE_CHECKING:
    from dgemma import LanguageModel

EXAMPLES = (
    "examples:\n"
    '  dgemma generate MODEL "Why is the sky blue?" --stats\n'
    "  dgemma generate MODEL --raw --seed 7 < beginning.txt > continued.txt\n"
    '  dgemma generate MODEL "Three primes, please." --json\n'
    '  dgemma generate MODEL "What is this?" --image photo.jpg\n'
    '  dgemma generate MODEL "Is 7 a prime?" --choice yes --choice no\n'
    '  dgemma generate MODEL "A user, please." --json-schema user.schema.json\n'
    """  dgemma generate MODEL "Is 7 a prime?" --pins '[{"at": 0, "text": "Yes, because"}]'"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, bundled:text, or a hub name")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - or none: from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    parser.add_argument(
        "--tensor-parallel", type=int, metavar="N", default=1,
        help="processes that compute the model together, each with a part of its weights (default: 1)",
    )  # fmt: skip
    add_generation_arguments(parser)
    add_image_arguments(parser)
    add_response_format_arguments(parser)
    add_pin_arguments(parser)


def run(args: argparse.Namespace, choose_weights: Callable[[], str] | None = None) -> int:
    """choose_weights: the model to load in place of MODEL; called when all else is checked."""
    check_model(args.model, args.prompt, "generate")
    options = generation_options(args)
    args.image_options, args.images = image_options(args), read_images(args.image)
    response_format = response_format_options(args, reads_stdin=args.prompt in (None, "-"))
    response_format |= pin_options(args)
    if is_helper(args.tensor_parallel):
        return _help(args)
    prompt = _prompt(args)
    if choose_weights is not None:
        args.model = choose_weights()
    with joined_ranks(args.model, args.tensor_parallel, args.device, args.arguments) as ranks:
        lm = load_model(args, **ranks)
        return _answer(lm, prompt, args, options, response_format)


def _help(args: argparse.Namespace) -> int:
    """As a rank that is not the first: whatever that is asked."""
    with joined_ranks(args.model, args.tensor_parallel, args.device, args.arguments) as ranks:
        load_model(args, quiet=True, **ranks).follow()
    return 0


def _answer(
    lm: LanguageModel,
    prompt: str,
    args: argparse.Namespace,
    options: dict[str, Any],
    response_format: dict[str, Any],
) -> int:
    # With --json only the finished answer is printed: the view writes to a discarded buffer.
    view = PlainView(io.StringIO()) if args.json else open_answer_view(lm, options)
    with recording(lm, args.trace, "generate"):
        _, answer = show_answer(
            view,
            lambda: _start(
                lm, prompt, args, {**options, **response_format, **args.image_options, "drafts": view.live}
            ),
        )
    if answer is None:
        print("dgemma generate: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(answer.to_json()))
    if args.stats:
        print(stats(answer), file=sys.stderr)
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        prompt = str(args.prompt)
    elif args.prompt is None and sys.stdin.isatty():
        raise InputError("no prompt; give it as an argument, or send it to stdin.")
    else:
        keep_undecodable_input()
        prompt = sys.stdin.read()
        if not args.raw:
            prompt = prompt.removesuffix("\n")  # the shell's, not the user's
    if not prompt.strip():
        raise InputError(f"the prompt is {prompt!r}; it must hold some text.")
    return check_text(prompt)


def _start(
    lm: LanguageModel, prompt: str, args: argparse.Namespace, options: dict[str, Any]
) -> Iterator[Event]:
    if lm.has_chat_template and not args.raw:
        system = [{"role": "system", "content": args.system}] if args.system else []
        messages = [*system, {"role": "user", "content": content_of(args.images, prompt)}]
        return lm.stream_chat(messages, thinking=args.thinking, **options)
    for name in ("system", "thinking"):
        if getattr(args, name):
            why = "--raw leaves it out" if args.raw else "this checkpoint has none"
            raise InputError(f"--{name} needs the chat template, and {why}. Drop --{name}.")
    images = {"images": args.images} if args.images else {}
    return lm.stream(prompt, **images, **options)
