"""Seconds from the key press to the first visible thing and to the answer, in a real terminal, idle and busy.

    python -m benchmarks.terminal_times --rounds 3

Busy: eight processes compute beside it. `generate` also runs as it did before: two threads that spin.
The seconds of a chat count from the typed line, those of `serve` end when it listens. Needs the dev extra.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks import record
from tools.record_terminal import load, spread
from tools.record_terminal import record as run_in_terminal

GENERATE = ["generate", "bundled:text", "The file ", "--raw", "--seed", "1", "--max-tokens", "64"]
SPINS = {"GOMP_SPINCOUNT": "300000"}  # what GNU's library does unless told otherwise
CASES: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "generate": (GENERATE, [], {}),
    "generate, two threads": ([*GENERATE, "--threads", "2"], [], {}),
    "generate, two threads that spin": ([*GENERATE, "--threads", "2"], [], SPINS),
    "generate, one thread": ([*GENERATE, "--threads", "1"], [], {}),
    "solve": (["solve", "--pace", "0"], [], {}),
    "chat": (["chat", "bundled:text", "--max-tokens", "64", "--seed", "1"], ["What is a file?", "/quit"], {}),
    "serve": (["serve", "bundled:text", "--port", "0"], [], {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, default=8)
    args = parser.parse_args()
    findings = {}
    for name, processes in (("idle", 0), ("busy", args.load)):
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
        with load(processes):
            for _ in range(args.rounds):
                for case, (argv, typed, environment) in CASES.items():
                    os.environ.update(environment)
                    recording = run_in_terminal(argv, 80, 24, typed, draws=False)
                    for variable in environment:
                        del os.environ[variable]
                    found[case].append((recording.first_s or 0.0, recording.answer_s))
                    print(name, case, found[case][-1], file=sys.stderr)
        findings[name] = {
            case: {"first_seen_s": spread([a for a, _ in seen]), "answer_s": spread([b for _, b in seen])}
            for case, seen in found.items()
        }
    record.write("terminal_times", {"rounds": args.rounds, "load": args.load, **findings})


if __name__ == "__main__":
    main()
