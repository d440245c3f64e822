"""A tokenizer of Gemma's kind, learned from texts.

It has the control tokens of the bundled tokenizer at their numbers, all 256 bytes, and pieces learned from
the texts. No piece goes past the end of a word or line, or joins letters with other characters; digits stand
alone. As in Gemma's file the merges alone see to that in encoding.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import dgemma

BUNDLED = Path(dgemma.__file__).parent / "data" / "tokenizer"
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"
MAX_PIECE = 16  # characters, as SentencePiece's
MIN_COUNT = 100  # of a character beyond ASCII; rarer ones are spelled as bytes
# What pieces are learned within: words, signs, line ends, tabs. One space belongs to what follows it.
_ONE_SPACE = f"(?:(?<!{SPACE}){SPACE})?"
WITHIN = Regex(rf"{_ONE_SPACE}[\p{{L}}\p{{M}}]+|\n+|\t+|{_ONE_SPACE}[^\p{{L}}\p{{M}}\p{{N}}\s{SPACE}]+")


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
