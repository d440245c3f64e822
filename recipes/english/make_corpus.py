"""Plain English sentences: small scenes, what WordNet says of words, Debian of its packages, and Python's
documentation.

    apt-get -o Acquire::Languages=en update; apt-get install wordnet-base python3-doc
    python -m recipes.english.make_corpus --out data/english

Writes `train.jsonl` and `held_out.jsonl`, an entry per line, and `chats/` with the same entries as questions
and answers. Kept are sentences of common words. An entry is held out by a hash of its name, and only if most
of what it says is new; a scene is held out with its whole topic. The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from recipes.english.debian import debian_entries, find_translations
from recipes.english.entry import SPLITS, Entry
from recipes.english.prose import sentences
from recipes.english.python_docs import python_entries
from recipes.english.scenes import scene_entries
from recipes.english.wordnet import wordnet_entries

NUM_SCENES = 30_000
MIN_COUNT = 20  # of a common word, in all sentences
MAX_RARE = 0  # rare words of a sentence
MIN_CHARS = 30  # of an entry
RUN = 5  # words; what two texts share is counted in runs of so many
MAX_SHARED = {"train": 0.5, "held_out": 0.1}  # of an entry's runs, with the training entries before it
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/english"), help="(default: data/english)")
    parser.add_argument(
        "--descriptions", type=Path, help="a Translation-en file (default: what apt has stored)"
    )
    parser.add_argument("--scenes", type=int, default=NUM_SCENES, help=f"(default: {NUM_SCENES:,})")
    args = parser.parse_args()
    read = [*debian_entries(args.descriptions or find_translations()), *wordnet_entries(), *python_entries()]
    write_corpus(args.out, [*new_entries(common_entries(read)), *scene_entries(args.scenes)])


def common_entries(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries as far as their sentences have common words."""
    counts = Counter(word for entry in entries for word in words(entry.text))
    for entry in entries:
        paragraphs = []
        for paragraph in entry.text.split("\n"):
            kept = []
            for sentence in sentences(paragraph):
                rare = {word for word in words(sentence) if counts[word] < MIN_COUNT}
                if len(rare) > MAX_RARE:
                    break
                kept.append(sentence)
            if kept:
                paragraphs.append(" ".join(kept))
        # A question asks for what the first sentence says.
        is_whole = bool(paragraphs) and entry.text.startswith(paragraphs[0][:20])
        text = "\n".join(paragraphs)
        if len(text) >= MIN_CHARS:
            yield replace(entry, text=text, question=entry.question if is_whole else "")


def new_entries(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Without entries that mostly repeat others; training entries come first."""
    seen: set[int] = set()
    for entry in sorted(entries, key=lambda entry: SPLITS.index(entry.split)):
        paragraphs = []
        for paragraph in entry.text.split("\n"):
            runs = runs_of(paragraph)
            if len(runs & seen) <= MAX_SHARED[entry.split] * len(runs):
                paragraphs.append(paragraph)
                if entry.split == "train":
                    seen |= runs
        if paragraphs and len(text := "\n".join(paragraphs)) >= MIN_CHARS:
            is_whole = text.startswith(entry.text[:20])
            yield replace(entry, text=text, question=entry.question if is_whole else "")


def runs_of(text: str) -> set[int]:
    """Runs of five words, hashed; a text that is shorter is one run."""
    said = words(text)
    return {hash(tuple(said[at : at + RUN])) for at in range(max(1, len(said) - RUN + 1))}


def words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def write_corpus(out: Path, entries: Iterable[Entry]) -> None:
    texts: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    for entry in entries:
        texts[entry.split].append(entry)
    (out / "chats").mkdir(parents=True, exist_ok=True)
    for split, some in texts.items():
        write_lines(out / f"{split}.jsonl", ({"text": entry.text, "source": entry.source} for entry in some))
        asked = [(entry.question, entry.text.split("\n")[0]) for entry in some if entry.question]
        asked += [(f"{entry.text} {chat[0]}", chat[1]) for entry in some for chat in entry.chats[-1:]]
        write_lines(
            out / "chats" / f"{split}.jsonl",
            ({"prompt": question, "response": answer} for question, answer in asked),
        )
        for source in sorted({entry.source for entry in some}):
            own = [entry for entry in some if entry.source == source]
            print(
                f"{split:10}{source:10}{len(own):>9,} entries{sum(len(e.text) for e in own):>12,} characters"
            )
        print(f"{split:10}{'chats':10}{len(asked):>9,}")


def write_lines(file: Path, records: Iterable[dict[str, str]]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main()
