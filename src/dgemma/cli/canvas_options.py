"""What `fill`, `edit` and `decide` share: a model that need not be named, and how it is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

MODEL = "bundled:text"


def add_words(
    parser: argparse.ArgumentParser, forms: Sequence[str], words: Sequence[tuple[str, str]]
) -> None:
    """Words without a dash, (name, help) in their order; how many were given says which they are.

    argparse gives a word that may be missing to nobody if options stand between it and the others. So each
    is a word of its own that must be there, and then need not.
    """
    parser.usage = "\n       ".join(f"%(prog)s {form} [options]" for form in forms)
    for number, (metavar, text) in enumerate(words):
        parser.add_argument(f"word{number}", metavar=metavar, help=text).required = False


def given_words(args: argparse.Namespace) -> list[str]:
    words = [getattr(args, name) for name in sorted(vars(args)) if name.startswith("word")]
    return [word for word in words if word is not None]


def looks_like_a_model(word: str) -> bool:
    """Where a word is missing, was it the one that is no model?"""
    try:
        return word.startswith("bundled:") or (Path(word) / "config.json").is_file()
    except (OSError, ValueError):  # a text that no file could be called
        return False


def add_model_arguments(parser: argparse.ArgumentParser, *, seed: int | None = None) -> None:
    usual = "drawn" if seed is None else str(seed)
    parser.add_argument(
        "--seed", type=int, default=seed, help=f"the same seed gives the same result (default: {usual})"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default: auto)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of the model (default: none)")
    parser.add_argument("--exact", action="store_true", help="the same bits in any batch (slower)")
    parser.add_argument(
        "--compile", action="store_true", help="fuse the vocabulary end (loading takes seconds more)"
    )
