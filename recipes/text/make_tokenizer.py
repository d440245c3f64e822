"""A tokenizer of Gemma's kind, learned from the corpus of `make_corpus`.

    python -m recipes.text.make_tokenizer --corpus data/text --out data/text/tokenizer --size 6144

It has the control tokens of the bundled tokenizer at their numbers, all 256 bytes, runs of 2 to 31 spaces,
and pieces learned from `train` and the chats. No piece goes past the end of a word or line, or joins letters
with other characters; digits stand alone. As in Gemma's file the merges alone see to that in encoding.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import dgemma
from dgemma.text import tokenizer as dgemma_tokenizer

BUNDLED = Path(dgemma.__file__).parent / "data" / "tokenizer"
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"
MAX_SPACES = 31
MAX_PIECE = 16  # characters, as SentencePiece's
MIN_COUNT = 100  # of a character beyond ASCII; rarer ones are spelled as bytes
# What pieces are learned within: words, signs, line ends, tabs. One space belongs to what follows it.
_ONE_SPACE = f"(?:(?<!{SPACE}){SPACE})?"
WITHIN = Regex(rf"{_ONE_SPACE}[\p{{L}}\p{{M}}]+|\n+|\t+|{_ONE_SPACE}[^\p{{L}}\p{{M}}\p{{N}}\s{SPACE}]+")
CODE = "stdlib"  # the source that is code; all others are prose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("data/text"), help="(default: data/text)")
    parser.add_argument("--out", type=Path, default=Path("data/text/tokenizer"))
    parser.add_argument("--size", type=int, default=6144, help="pieces (default: 6,144)")
    args = parser.parse_args()
    make_tokenizer(args.corpus, args.out, args.size)
    made = dgemma_tokenizer.Tokenizer.from_directory(args.out)
    print(f"{args.out}: {made.vocab_size:,} pieces")
    for kind, texts in held_out_texts(args.corpus).items():
        num_bytes = sum(len(text.encode()) for text in texts)
        num_tokens = sum(len(made.encode(text)) for text in texts)
        if num_tokens:
            print(f"held-out {kind}: {num_bytes / num_tokens:.2f} bytes per token")


def make_tokenizer(corpus: Path, out: Path, size: int) -> None:
    runs, run_merges = runs_of_spaces()
    pieces, merges = learn(train_texts(corpus), size - len(control_names()) - len(BYTES) - len(runs))
    # Runs first: otherwise the last space would go to the word after them.
    made = write_tokenizer(out, [*runs, *pieces], [*run_merges, *merges])
    assert made == size, f"{made:,} pieces, not {size:,}; the corpus is too small"


def control_names() -> list[str]:
    """The control tokens of the bundled tokenizer, in the order of their numbers."""
    controls = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert [token["id"] for token in controls] == list(range(len(controls)))
    return [token["content"] for token in controls]


def write_tokenizer(out: Path, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> int:
    """Control tokens, bytes, and these pieces; -> how many in all."""
    names = control_names()
    vocab = {piece: number for number, piece in enumerate([*names, *BYTES, *pieces])}
    made = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(merges),
            unk_token="<unk>",  # noqa: S106 - a piece, not a password
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    out.mkdir(parents=True, exist_ok=True)
    made.save(str(out / "tokenizer.json"), pretty=False)
    for name in COMPANIONS:
        shutil.copyfile(BUNDLED / name, out / name)
    return len(vocab)


def runs_of_spaces() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces of 2 to 31 spaces, and merges that make one of them of any such run."""
    powers = [(half, half) for half in (1, 2, 4, 8)]
    # Then what is left of a run, its longest part first: 16 8 2 1, 16 8 3, 16 11, 27.
    sums = [(left, right) for left in (2, 4, 8, 16) for right in range(1, left)]
    merges = [(SPACE * left, SPACE * right) for left, right in (*powers, *sums)]
    return [SPACE * length for length in range(2, MAX_SPACES + 1)], merges


def learn(texts: Sequence[str], size: int, within: Regex = WITHIN) -> tuple[list[str], list[tuple[str, str]]]:
    """`size` pieces, characters first, and the merges that make them. within: what a piece may be part of."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    common = {
        character for character, count in counts.items() if count >= MIN_COUNT and character.isprintable()
    }
    alphabet = {*map(chr, range(33, 127)), "\n", "\t", SPACE, *common} - {" "}
    # The trainer takes all characters it sees.
    rare = re.compile(f"[^ {''.join(map(re.escape, sorted(alphabet)))}]")
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    learner.pre_tokenizer = pre_tokenizers.Split(within, "removed", invert=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), max_token_length=MAX_PIECE, show_progress=False
    )
    learner.train_from_iterator((part for text in texts for part in rare.split(text)), trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    return pieces, [tuple(merge) for merge in learned["merges"]]


def train_texts(corpus: Path) -> list[str]:
    chats = (corpus / "chats" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    said = (message["content"] for chat in chats for message in json.loads(chat)["messages"])
    return [*_texts(corpus / "train"), *said]


def held_out_texts(corpus: Path) -> dict[str, list[str]]:
    sources = sorted(path for path in (corpus / "held_out").iterdir() if path.is_dir())
    return {
        "prose": [text for source in sources if source.name != CODE for text in _texts(source)],
        "code": _texts(corpus / "held_out" / CODE),
    }


def _texts(directory: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(directory.rglob("*.txt"))]


if __name__ == "__main__":
    main()
