"""Plain English sentences: small scenes, and what WordNet says of words.

    apt-get install wordnet-base
    python -m recipes.english.make_corpus --out data/english

Writes `train.jsonl` and `held_out.jsonl`, an entry per line, and `chats/` with the same entries as questions
and answers. Kept are sentences of common words. An entry is held out by a hash of its name, and only if most
of what it says is new; a scene is held out with its whole topic. `new_scenes.jsonl` has scenes of the topics
in training, none of which is a training scene. The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from recipes.english.entry import SPLITS, Entry
from recipes.english.prose import sentences
from recipes.english.scenes import scene_entries
from recipes.english.wordnet import wordnet_entries

NUM_SCENES = 40_000
NUM_NEW_SCENES = 1_000
MIN_COUNT = 20  # of a common word, in all sentences
MIN_CHARS = 30  # of an entry
RUN = 5  # words; what two texts share is counted in runs of so many
MAX_SHARED = {"train": 0.5, "held_out": 0.1}  # of an entry's runs, with the training entries before it
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/english"), help="(default: data/english)")
    parser.add_argument("--scenes", type=int, default=NUM_SCENES, help=f"(default: {NUM_SCENES:,})")
    args = parser.parse_args()
    definitions = new_entries(common_entries(list(wordnet_entries())))
    scenes = list(scene_entries(args.scenes))
    write_corpus(args.out, [*definitions, *scenes])
    write_lines(args.out / "new_scenes.jsonl", map(line_of, new_scenes(scenes, NUM_NEW_SCENES)))


def new_scenes(scenes: Iterable[Entry], count: int) -> Iterator[Entry]:
    """So many scenes of the topics in training, with whole texts that are not among `scenes`."""
    known = {scene.text for scene in scenes}
    others = (scene for scene in scene_entries(10 * count, seed=1) if scene.split == "train")
    return islice((scene for scene in others if scene.text not in known), count)


def common_entries(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries up to their first sentence with a word that is not common."""
    counts = Counter(word for entry in entries for word in words(entry.text))
    for entry in entries:
        kept = []
        for sentence in sentences(entry.text):
            if any(counts[word] < MIN_COUNT for word in words(sentence)):
                break
            kept.append(sentence)
        if len(text := " ".join(kept)) >= MIN_CHARS:
            yield replace(entry, text=text)


def new_entries(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Without entries that mostly repeat others; training entries come first."""
    seen: set[int] = set()
    for entry in sorted(entries, key=lambda entry: SPLITS.index(entry.split)):
        runs = runs_of(entry.text)
        if len(runs & seen) <= MAX_SHARED[entry.split] * len(runs):
            if entry.split == "train":
                seen |= runs
            yield entry


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
        write_lines(out / f"{split}.jsonl", map(line_of, some))
        asked = [(entry.question, entry.text) for entry in some if entry.question]
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


def line_of(entry: Entry) -> dict[str, str]:
    return {"text": entry.text, "source": entry.source}


def write_lines(file: Path, records: Iterable[dict[str, str]]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main()
