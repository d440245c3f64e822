"""Talk with a model: type a line, watch the answer settle, go on.

In a pipe each line of stdin is one turn and the answers are plain text on stdout. A line that begins with
a slash is a command; /help lists them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.images import add_image_arguments, content_of, image_options, read_image
from dgemma.cli.options import (
    add_generation_arguments,
    add_response_format_arguments,
    check_text,
    generation_options,
    keep_undecodable_input,
    load_model,
    recording,
    response_format_options,
)
from dgemma.cli.views.answer_view import open_answer_view, show_answer, stats
from dgemma.durable_files import write_whole
from dgemma.errors import DgemmaError, InputError, suggestion
from dgemma.events import Answer
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel

EXAMPLES = (
    "examples:\n"
    '  dgemma chat MODEL --system "Answer in one sentence."\n'
    "  dgemma chat MODEL --seed 7 < questions.txt > answers.txt"
)
COMMANDS = {
    "/new": "start over",
    "/seed N": "the seed of the answers to come; without N each draws its own",
    "/image PATH": "an image for the next question",
    "/system TEXT": "system text from now on; without TEXT none",
    "/regenerate": "another answer to the last question",
    "/stats": "tokens, seconds and steps of the last answer",
    "/save FILE.json": "write the conversation to a file",
    "/load FILE.json": "go on with a conversation that was saved",
    "/help": "this list",
    "/quit": "end; so do /exit, /bye and Ctrl-D",
}
_HELP_PAGE = "\n".join(
    [
        *(f"{command:<17}{effect}" for command, effect in COMMANDS.items()),
        "A trailing \\ continues the line. A space before a slash sends it to the model.",
        "Ctrl-C ends a running answer: what is final of it stays in the conversation.",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, bundled:text, or a hub name")
    add_generation_arguments(parser)
    add_image_arguments(parser)
    add_response_format_arguments(parser)


def run(args: argparse.Namespace, choose_weights: Callable[[], str] | None = None) -> int:
    """choose_weights: the model to load in place of MODEL; called when all else is checked."""
    options = generation_options(args)
    of_images = image_options(args)
    images = [checked_path(path, "--image") for path in args.image or ()]
    response_format = response_format_options(args, reads_stdin=True)
    if choose_weights is not None:
        args.model = choose_weights()
    lm = load_model(args)
    if not lm.has_chat_template:
        raise InputError(f"{args.model} has no chat template; use `dgemma generate --raw`.")
    conversation = Conversation(
        lm,
        options,
        args.system,
        response_format=response_format,
        thinking=args.thinking,
        with_stats=args.stats,
        images=images,
        image_options=of_images,
    )
    keep_undecodable_input()
    typed = sys.stdin.isatty()
    if typed:
        _enable_editing()
        print("/help lists the commands, Ctrl-D ends.", file=sys.stderr)
    with recording(lm, args.trace, "chat"):
        return _converse(conversation, typed=typed)


def _converse(conversation: Conversation, *, typed: bool) -> int:
    """Take turns until the input ends -> the exit status."""
    num_errors = 0
    while True:
        try:
            line = _read_turn() if typed else _read_line()
        except (EOFError, KeyboardInterrupt) as end:
            if not typed and isinstance(end, KeyboardInterrupt):
                raise
            if typed:
                print(file=sys.stderr)
            break
        if line.strip() in ("/quit", "/exit", "/bye"):
            break
        try:
            if not conversation.take(line) and not typed:
                return 130  # a script ends; an interactive user continues
        except DgemmaError as error:
            num_errors += 1
            print(f"dgemma chat: {error}", file=sys.stderr, flush=True)
    # An interactive user has read the errors; a script reads the exit status.
    return 1 if num_errors and not typed else 0


class Conversation:
    """The turns so far, and the options of the next answer."""

    def __init__(
        self,
        lm: LanguageModel,
        options: dict[str, Any],
        system: str | None,
        *,
        response_format: dict[str, Any] | None = None,
        thinking: bool = False,
        with_stats: bool = False,
        images: Sequence[str] = (),
        image_options: dict[str, Any] | None = None,
    ) -> None:
        self.lm = lm
        self.options = options
        self.system = system
        self.response_format = response_format or {}  # of every answer
        self.image_options = image_options or {}
        self.thinking = thinking
        self.with_stats = with_stats
        self.turns: list[dict[str, Any]] = []
        self._images = list(images)  # paths, for the next question
        self._saved: set[Path] = set()
        self._last: Answer | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def take(self, line: str) -> bool:
        """Run a command or answer a turn; ignore an empty line. -> False if Ctrl-C ended the answer."""
        line = check_text(line)
        if line.strip() == "/regenerate":
            return self._regenerate()
        if line.startswith("/"):
            self._run_command(*line.strip().partition(" ")[::2])
        elif line.strip():
            images, self._images = self._images, []
            return self._answer(content_of(images, line.strip()))
        return True

    def _regenerate(self) -> bool:
        """Answer the last question once more; with a fixed seed, with the next one."""
        questions = [at for at, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not questions:
            raise InputError("/regenerate needs a question first; type one.")
        if "seed" in self.options:
            self._set_seed(str(self.options["seed"] + 1))
        before = self.turns
        self.turns = before[: questions[-1]]
        try:
            finished = self._answer(before[questions[-1]]["content"])
        except BaseException:
            self.turns = before
            raise
        if len(self.turns) == questions[-1]:  # interrupted before its first text: the old answer stays
            self.turns = before
        return finished

    def _answer(self, content: str | list[dict[str, Any]]) -> bool:
        turn = {"role": "user", "content": content}
        view = open_answer_view(self.lm, self.options)
        text, answer = show_answer(
            view,
            lambda: self.lm.stream_chat(
                [*self.messages, turn],
                thinking=self.thinking,
                drafts=view.live,
                **self.options,
                **self.response_format,
                **self.image_options,
            ),
        )
        self._last = answer or self._last
        if text or answer is not None:
            # Text committed before Ctrl-C is on the screen, so it stays in the conversation.
            self.turns += [turn, {"role": "assistant", "content": text}]
        if answer is None:
            print("dgemma chat: interrupted", file=sys.stderr)
        elif self.with_stats:
            print(stats(answer), file=sys.stderr)
        return answer is not None

    def _run_command(self, command: str, rest: str) -> None:
        rest = rest.strip()
        if command == "/new":
            self.turns, self._images = [], []
            self._notify("a new conversation")
        elif command == "/seed":
            self._set_seed(rest)
        elif command == "/system":
            self.system = rest or None
            self._notify("the system text applies from now on" if rest else "no system text")
        elif command == "/image":
            self._images.append(checked_path(rest, command))
            self._notify(f"{len(self._images)} with the next question")
        elif command == "/stats":
            if self._last is None:
                raise InputError("/stats needs an answer first.")
            self._notify(stats(self._last))
        elif command == "/save":
            self._save(rest)
        elif command == "/load":
            self._load(rest)
        elif command == "/help":
            self._notify(_HELP_PAGE)
        else:
            names = [usage.split()[0] for usage in COMMANDS]
            raise InputError(f"unknown command {command!r}{suggestion(command, names)} /help lists them.")

    def _set_seed(self, value: str) -> None:
        try:
            seed = int(value) if value else None
        except ValueError:
            raise InputError(f"/seed is {value!r}; it must be a whole number.") from None
        options = {name: given for name, given in self.options.items() if name != "seed"}
        if seed is not None:
            options["seed"] = seed
        GenerationParams.make(**options)
        self.options = options
        self._notify("each answer draws its seed" if seed is None else f"seed {seed}")

    def _save(self, name: str) -> None:
        if not name:
            raise InputError("/save needs the name of a file: /save FILE.json")
        path = Path(name).expanduser()
        if path.exists() and path not in self._saved:
            raise InputError(f"{path} exists; choose another name.")
        content = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n"
        try:
            write_whole(path, content.encode())  # on a full disk what was saved before stays
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}. Choose another place.") from None
        self._saved.add(path)
        self._notify(f"{len(self.turns)} messages in {path}")

    def _load(self, name: str) -> None:
        if not name:
            raise InputError("/load needs the name of a file: /load FILE.json")
        path = Path(name).expanduser()
        try:
            found = json.loads(path.read_text("utf-8"))
            json.dumps(found, ensure_ascii=False).encode()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}. /save writes such a file.") from None
        except UnicodeError:  # in the file, or as an escape of half a character
            raise InputError(f"{path} holds text that is not UTF-8. /save writes such a file.") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not JSON. /save writes such a file.") from None
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise InputError(f'{path} holds no conversation: {{"messages": [...]}} with role and content.')
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        turns = messages[1:] if system is not None else messages
        if any(turn["role"] == "system" for turn in turns):
            raise InputError(f"{path} has a system text that is not its first message; only there it can be.")
        self.system, self.turns = system, turns
        self._notify(f"{len(turns)} messages from {path}")

    def _notify(self, notice: str) -> None:
        """Notices go to stderr; stdout holds only the answers."""
        print(notice, file=sys.stderr)


def checked_path(path: str, name: str) -> str:
    """The whole path of an image that can be read. It is read anew at each turn, as /save keeps the path."""
    if not path:
        raise InputError(f"{name} needs the path of a file: {name} PATH")
    read_image(path, name)
    return str(Path(path).expanduser().absolute())


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ("system", "user", "assistant"):
        return False
    content = value.get("content")
    if value["role"] == "user" and isinstance(content, list):
        return bool(content) and all(map(_is_part, content))
    return isinstance(content, str)


def _is_part(value: Any) -> bool:
    """A text, or an image by its path."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind in ("text", "image") and value.keys() == {"type", kind} and isinstance(value[kind], str)


def _enable_editing() -> None:
    with suppress(ImportError):  # Windows
        import readline  # noqa: F401  input() edits and remembers lines once it is imported


def _read_turn() -> str:
    """A turn typed at a terminal; each trailing backslash continues it on the next line."""
    parts = [_ask("> ")]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1][:-1]
        parts.append(_ask(". "))
    return "\n".join(parts)


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return _read_line()


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
