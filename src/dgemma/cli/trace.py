"""Watch, draw, compare and replay recorded generations.

`--trace FILE` of generate, chat, fill, edit, extract, decide, solve and eval records one.

  show FILE              play it on the terminal: play, pause, step, jump
  svg FILE OUT.svg       some of its steps as a picture; png and gif likewise
  html FILE OUT.html     a page that plays it in any browser, offline
  diff FILE FILE         where two runs part, and by how much
  replay FILE [MODEL]    run it again: token for token the same, or where not
  stats FILE...          how canvases settle: steps, revisions, the last positions"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgemma.cli.options import add_load_arguments, load_with_progress
from dgemma.cli.views.terminal import print_styled, supports_escapes
from dgemma.errors import InputError
from dgemma.trace.compare import TraceDiff
from dgemma.trace.frames import Frame, make_frames
from dgemma.trace.html import to_html
from dgemma.trace.stats import TraceStats, trace_stats
from dgemma.trace.svg import COLUMNS, chosen_frames, to_svg
from dgemma.trace.trace import Trace, TraceRequest
from dgemma.trace.trace_reader import read_trace

EXAMPLES = (
    "examples:\n"
    "  dgemma solve --band hard --trace puzzle.trace\n"
    "  dgemma trace show puzzle.trace\n"
    "  dgemma trace svg puzzle.trace puzzle.svg --frames 5\n"
    "  dgemma trace html puzzle.trace puzzle.html\n"
    "  dgemma trace replay puzzle.trace bundled:sudoku\n"
    "  dgemma trace diff fp32.trace int8.trace\n"
    "  dgemma trace stats *.trace --json"
)
ACTIONS = ("show", "svg", "png", "gif", "html", "diff", "replay", "stats")
DIFFERENT = 1  # exit status of diff and replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help=", ".join(ACTIONS))
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace files, and OUT or MODEL")
    parser.add_argument(
        "--request",
        type=int,
        metavar="N",
        help="of a fill or an edit: which of its requests (default: the longest)",
    )
    parser.add_argument("--frames", type=int, default=4, metavar="N", help="of an svg or png (default: 4)")
    parser.add_argument(
        "--columns", type=int, default=COLUMNS, metavar="N", help=f"of an svg: per line (default: {COLUMNS})"
    )
    parser.add_argument("--json", action="store_true", help="of diff, replay and stats: for a program")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.frames < 1:
        raise InputError(f"--frames is {args.frames}; it must be at least 1.")
    if not 1 <= args.columns <= 1000:
        raise InputError(f"--columns is {args.columns}; it must be between 1 and 1000.")
    files: list[str] = args.files
    if args.action == "stats":
        return _stats([read_trace(file) for file in files], as_json=args.json)
    if args.action == "diff":
        if len(files) != 2:
            args.parser.error("diff takes two traces")
        return _diff(read_trace(files[0]), read_trace(files[1]), as_json=args.json, names=files)
    if args.action == "replay":
        if len(files) > 2:
            args.parser.error("replay takes a trace and a model")
        return _replay(read_trace(files[0]), files[1] if len(files) == 2 else None, args)
    if args.action == "show":
        if len(files) != 1:
            args.parser.error("show takes one trace")
        return _show(_frames(read_trace(files[0]), args.request))
    if len(files) != 2:
        args.parser.error(f"{args.action} takes a trace and the file to write")
    if args.action == "html":
        _write_page(read_trace(files[0]), Path(files[1]))
        return 0
    return _draw(_frames(read_trace(files[0]), args.request), Path(files[1]), args)


def _write_page(trace: Trace, out: Path) -> None:
    try:
        out.write_text(to_html(trace, out.stem), encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}.") from None


def _frames(trace: Trace, number: int | None) -> list[Frame]:
    frames = make_frames(trace, _chosen(trace, number))
    if not frames:
        raise InputError("the trace has no steps: nothing was written, or it was cut.")
    return frames


def _chosen(trace: Trace, number: int | None) -> TraceRequest:
    if not trace.requests:
        raise InputError("the trace has no requests.")
    if number is None:
        return trace.longest
    if not 0 <= number < len(trace.requests):
        raise InputError(f"--request is {number}; the trace has requests 0 to {len(trace.requests) - 1}.")
    return trace.requests[number]


def _show(frames: Sequence[Frame]) -> int:
    if sys.stdin.isatty() and sys.stdout.isatty() and supports_escapes():
        from dgemma.cli.views.trace_player import play  # needs a terminal that Windows has not

        play(frames)
        return 0
    lines = [f"{frame.title}: {''.join(cell.text for cell in frame.cells)}\n" for frame in frames]
    print_styled([(line, "") for line in lines])
    return 0


def _draw(frames: Sequence[Frame], out: Path, args: argparse.Namespace) -> int:
    try:
        if args.action == "svg":
            drawing = to_svg(chosen_frames(frames, args.frames), columns=args.columns)
            out.write_text(drawing, encoding="utf-8")
        elif args.action == "png":
            from dgemma.trace.picture import write_png

            write_png(chosen_frames(frames, args.frames), out)
        else:
            from dgemma.trace.picture import write_gif

            write_gif(frames, out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}.") from None
    return 0


def _replay(trace: Trace, model: str | None, args: argparse.Namespace) -> int:
    if model is None:
        model = _model_of(trace)
    lm = load_with_progress(
        model,
        threads=args.threads,
        all_cores=True,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact,
        compile=args.compile,
        adapter=args.adapter,
    )
    again = lm.replay(trace)
    return _diff(trace, again, as_json=args.json, names=("the trace", "the replay"))


def _model_of(trace: Trace) -> str:
    """The bundled model that the trace names."""
    about = trace.about.get("model")
    name = about.get("name") if isinstance(about, dict) else None
    if name in ("sudoku", "text", "forms"):
        return f"bundled:{name}"
    raise InputError(
        f"the trace is of the model {str(name)[:80]!r}; give its path: dgemma trace replay FILE MODEL"
    )


def _diff(first: Trace, second: Trace, *, as_json: bool, names: Sequence[str]) -> int:
    found = first.compare(second)
    if as_json:
        print(json.dumps(_diff_json(found)))
    else:
        print_styled([(line + "\n", "") for line in _diff_lines(found, first, second, names)])
    return 0 if found.is_same else DIFFERENT


def _diff_json(found: TraceDiff) -> dict[str, Any]:
    parting = found.parting
    return {
        "same": found.is_same,
        "steps_equal": found.steps,
        "largest_entropy_difference": found.entropy,
        "facts": [{"name": name, "first": a, "second": b} for name, a, b in _plain(found.about)],
        "parting": None
        if parting is None
        else {
            "what": parting.what,
            "request": parting.request,
            "canvas": parting.canvas,
            "step": parting.step,
            "position": parting.position,
            "positions": parting.count,
            "first": parting.first,
            "second": parting.second,
            "entropy": parting.entropy,
        },
    }


def _plain(facts: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    return [(name, _short(a), _short(b)) for name, a, b in facts]


def _short(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else f"{value!r:.80}"


def _diff_lines(found: TraceDiff, first: Trace, second: Trace, names: Sequence[str]) -> list[str]:
    lines = [f"{name}: {a} | {b}" for name, a, b in _plain(found.about) if name != "command"]
    parting = found.parting
    if parting is None:
        lines.append(f"the same, token for token: {found.steps} steps")
    else:
        lines.append(f"{found.steps} steps are the same; then they part at {parting}")
        if parting.what in ("argmax", "drawn"):
            for name, trace, token in zip(
                names, (first, second), (parting.first, parting.second), strict=True
            ):
                text = "nothing is accepted" if token is None else repr(trace.text(token))
                lines.append(f"  {name}: {text}")
            assert parting.entropy is not None
            a, b = parting.entropy
            lines.append(
                f"  entropy there {a:.2f} | {b:.2f} nats; {parting.count} positions of this step differ"
            )
    if found.entropy:
        lines.append(f"entropies before differ by up to {found.entropy:.2f} nats")
    return lines


def _stats(traces: Sequence[Trace], *, as_json: bool) -> int:
    found = trace_stats(traces)
    if found is None:
        raise InputError("no trace has a canvas.")
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        print("\n".join(_stats_lines(found)))
    return 0


def _stats_lines(found: TraceStats) -> list[str]:
    def row(name: str, value: str, note: str = "") -> str:
        return f"{name:<34}{value:>8}   {note}".rstrip()

    lines = [
        row("canvases", str(found.canvases)),
        row("steps per canvas", f"{found.steps:.1f}"),
        row("revisions per position", f"{found.revisions:.2f}", "changes of the argmax after the first step"),
        row("  of these in the second half", f"{found.late_revisions:.2f}"),
        row(
            "steps for the last 5 %",
            f"{found.share_for_the_last:.0%}",
            "of the steps, after the others settled",
        ),
        row("settling order", f"{found.left_to_right:+.2f}", "1: left to right, 0: any, -1: right to left"),
        "settled by tenths of the steps",
    ]
    for tenth, share in enumerate(found.settled_by, start=1):
        lines.append(f"  {tenth * 10:>3} %  {'#' * round(40 * share):<40} {share:.0%}")
    return lines
