"""Train the small tokenizer that `dgemma new` puts beside its random weights.

    python -m tools.make_tokenizer

It has the released model's control tokens at their released numbers, byte fallback, and 2,048 pieces
learned from the docstrings of Python's standard library. Needs `tokenizers` (in the dev extra).
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
OUT = Path(__file__).parent.parent / "src" / "dgemma" / "data" / "tokenizer"

NAMED = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
    52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>",
}  # fmt: skip
CONTROL = [NAMED.get(number, f"<unused{number}>") for number in range(107)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def docstrings() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and text.isascii():
                    yield text


def main() -> None:
    normalizer = normalizers.Replace(" ", "▁")
    splitter = pre_tokenizers.Split(" ", "merged_with_previous")
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learner.train_from_iterator(
        docstrings(),
        trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(CONTROL) - len(BYTES), show_progress=False),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {piece: number for number, piece in enumerate([*CONTROL, *BYTES, *pieces])}
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",  # noqa: S106 - a piece, not a password
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    OUT.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(OUT / "tokenizer.json"), pretty=False)
    for text in ("Hello, world!", "naïve café ☕ 日本", "def f(x):\n    return x"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text, (text, tokenizer.decode(ids))


if __name__ == "__main__":
    main()
