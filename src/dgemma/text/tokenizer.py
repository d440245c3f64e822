"""The tokenizer: user text to token ids that are never control tokens, and ids back to text."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from dgemma.errors import CheckpointError, InputError
from dgemma.gguf_file import GgufFile, is_gguf, read_gguf

MAX_TEXT_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 16 << 20
_RARE = "\U0010ffff"

# Added tokens of these shapes are control tokens, also where the file does not mark them as special.
# All other added tokens (Gemma's `\n\n`, runs of spaces, `<table>`) are ordinary text.
_CONTROL_SHAPE = re.compile(
    r"<\|.+|.+\|>|<unused\d+>|<(?:pad|eos|bos|unk|mask|s|/s)>|<(?:start|end)_of_\w+>|\[@?\w+@?\]", re.DOTALL
)
_TOKENIZER_IN_GGUF = "tokenizer.huggingface.json"
_ID_KEYS = {
    "bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown",
    "mask_token": "mask",
}  # fmt: skip
_BYTE_SHAPE = re.compile(r"<0x..>")
_BYTE_VALUE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's `tokenizer.json`; control (special) tokens are kept apart from text."""

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        controls: dict[str, int],
        names: dict[str, str],
        *,
        is_bounded: bool = False,
    ):
        """is_bounded: no token stands for more characters than its own entry has."""
        self._engine = engine
        self._max_chars: int | None = None
        self._max_tokens = 0
        self._control_names = {id_: name for name, id_ in controls.items()}
        self.controls: Mapping[str, int] = MappingProxyType(controls)
        # Their names in chat templates: {"bos_token": "<bos>", ...}.
        self.template_names: Mapping[str, str] = MappingProxyType(names)
        vocab = engine.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max([*vocab.values(), *controls.values()], default=-1)
        # Byte-fallback tokens: one byte each; only a run of them decodes to characters.
        self.byte_ids = frozenset(id_ for token, id_ in vocab.items() if _BYTE_SHAPE.fullmatch(token))
        # Characters that one token stands for at most; None: unknown.
        self._longest = max(map(len, vocab)) if is_bounded and len(self.byte_ids) == 256 else None

    @cached_property
    def fingerprint(self) -> str:
        """A short name for its vocabulary and rules."""
        return hashlib.sha256(self._engine.to_str().encode()).hexdigest()[:16]

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        directory = Path(path)
        gguf = read_gguf(directory) if is_gguf(directory) else None
        if gguf is not None:
            directory = directory.parent
        file = directory / "tokenizer.json"
        if file.is_file():
            raw = read_object(file, max_bytes=_MAX_TOKENIZER_BYTES)
        elif gguf is not None:
            file, raw = gguf.path, _tokenizer_in(gguf)
        else:
            raise CheckpointError(f"{file} is missing; text in and out needs it. Token ids work without it.")
        config_file = directory / "tokenizer_config.json"
        config = read_object(config_file, max_bytes=_MAX_CONFIG_BYTES) if config_file.is_file() else {}
        if gguf is not None:
            config = {**_named_in(gguf, raw), **config}
        return cls._of_objects(raw, config, file)

    @classmethod
    def _of_objects(cls, raw: dict[str, Any], config: dict[str, Any], file: Path) -> Tokenizer:
        names, listed = _named_specials(config)
        try:
            _check_decoder(file, raw.get("decoder"))
            added = raw.get("added_tokens") or []
            for token in added:
                token["special"] = (
                    token["special"]
                    or token["content"] in listed
                    or _CONTROL_SHAPE.fullmatch(token["content"]) is not None
                )
            engine = _build(raw)
            engine.encode(
                _RARE
            )  # a character that the vocabulary may lack is found out now, not by a request
            controls = {token["content"]: int(token["id"]) for token in added if token["special"]}
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception for any broken part
            raise CheckpointError(f"{file} is not a usable tokenizer: {_one_line(error)}") from None
        for name in listed - controls.keys():
            if (id_ := engine.token_to_id(name)) is not None:
                controls[name] = id_
        named = {key: name for key, name in names.items() if name in controls}
        return cls(engine, controls, named, is_bounded=_is_bounded(raw))

    def limited(self, max_tokens: int) -> Tokenizer:
        """The same tokenizer, which refuses a text that must have more tokens before it is encoded.

        Its characters are counted, and divided by those of the longest token: a text of many megabytes would
        otherwise be encoded for seconds, only to be refused. A text that passes may still be too long.
        """
        limited = copy.copy(self)
        limited._max_tokens = max_tokens
        limited._max_chars = None if self._longest is None else max_tokens * self._longest
        return limited

    def check_length(self, num_chars: int) -> None:
        """Refuse a text of so many characters if it must have more tokens than the limit."""
        if self._max_chars is not None and num_chars > self._max_chars:
            assert self._longest is not None
            raise InputError(
                f"the text has {num_chars} characters, so at least {num_chars // self._longest} tokens; at "
                f"most {self._max_tokens} fit. Shorten it.",
                code="context_length_exceeded",
            )

    @property
    def bos_id(self) -> int | None:
        return self.id_of(self.template_names.get("bos_token", "<bos>"))

    @property
    def eos_id(self) -> int | None:
        return self.id_of(self.template_names.get("eos_token", "<eos>"))

    @property
    def image_names(self) -> tuple[str, str, str]:
        """The controls of images: in place of each soft token, before an image, and after it."""
        names = (("image_token", "<|image|>"), ("boi_token", "<|image>"), ("eoi_token", "<image|>"))
        image, begin, end = (self.template_names.get(key, name) for key, name in names)
        return image, begin, end

    def id_of(self, name: str) -> int | None:
        """The id of a control token such as `<|turn>`, or None."""
        return self.controls.get(name)

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary entry of one id: `▁the`, `<0xE2>`, `<|turn>`; None if it has none."""
        (id_,) = _checked_ids([id_])
        return self._control_names.get(id_) or self._engine.id_to_token(id_)

    def bytes_of(self, id_: int) -> bytes | None:
        """What one id adds to a text; None for a control, and for an id without a vocabulary entry."""
        if not self.text_ids([id_]):
            return None
        byte = _BYTE_VALUE.fullmatch(self.id_to_token(id_) or "") if id_ in self.byte_ids else None
        return self.decode([id_]).encode() if byte is None else bytes.fromhex(byte[1])

    def encode(self, text: str) -> list[int]:
        """The ids of user text. Never a control token, whatever the text contains."""
        check_text(text)
        self.check_length(len(text))
        try:
            # `encode` holds the interpreter lock: a text of 2 MB would stop every other thread for seconds.
            (fast,) = self._engine.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"the tokenizer cannot encode this text: {_one_line(error)}.") from None
        found: list[int] = fast.ids
        if self._control_names.keys().isdisjoint(found):
            return found
        # A vocabulary may hold a control as an ordinary token too: encode it character by character.
        encoding = self._engine.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            ids += [id_] if id_ not in self._control_names else self._encode_by_character(text, start, end)
        return ids

    def decode(self, ids: Iterable[int], *, controls: bool = False) -> str:
        """The text of ids. Controls are left out or shown by name; unknown ids give no text."""
        if not controls:
            return self._engine.decode(self.text_ids(ids), skip_special_tokens=False)
        shown: list[str] = []
        run: list[int] = []
        for id_ in ids:
            if id_ in self._control_names:
                shown += [self.decode(run), self._control_names[id_]]
                run = []
            else:
                run.append(id_)
        return "".join([*shown, self.decode(run)])

    def text_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids that have text: no controls, and no ids without a vocabulary entry."""
        return [
            id_
            for id_ in _checked_ids(ids)
            if id_ not in self._control_names and self._engine.id_to_token(id_) is not None
        ]

    def _encode_by_character(self, text: str, start: int, end: int) -> list[int]:
        ids: list[int] = []
        for position in range(start, end):
            encoded = self._engine.encode(text[position], add_special_tokens=False).ids
            if not encoded or not self._control_names.keys().isdisjoint(encoded):
                raise InputError(
                    f"the character {text[position]!r} at position {position} has no token in this "
                    "tokenizer; remove it."
                )
            ids += encoded
        return ids


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint has a tokenizer: a file, or one within or beside a GGUF file."""
    if not is_gguf(path):
        return (path / "tokenizer.json").is_file()
    return (path.parent / "tokenizer.json").is_file() or _TOKENIZER_IN_GGUF in read_gguf(path).metadata


def _tokenizer_in(gguf: GgufFile) -> dict[str, Any]:
    """The `tokenizer.json` that a GGUF file holds.

    Its vocabulary alone does not do: it does not say which entries are matched whole before merges (Gemma's
    runs of newlines, its HTML tags), so a tokenizer made of it would encode some texts differently.
    """
    text = gguf.text(_TOKENIZER_IN_GGUF, max_bytes=_MAX_TOKENIZER_BYTES)
    if text is None:
        raise gguf.refuse(
            f"holds no tokenizer.json ({_TOKENIZER_IN_GGUF}), and its list of tokens does not determine how "
            "text is encoded. Put tokenizer.json of the original model beside it. Token ids work without it."
        )
    return _object_of(text, f"{gguf.path}: {_TOKENIZER_IN_GGUF}")


def _named_in(gguf: GgufFile, raw: dict[str, Any]) -> dict[str, Any]:
    """The special tokens that the metadata names by their ids."""
    added = raw.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    # A broken id may be of a type that is no key.
    names: dict[object, Any] = {
        id_: token.get("content") for token in tokens if isinstance(id_ := token.get("id"), int)
    }
    ids = {name: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ID_KEYS.items()}
    return {name: names[id_] for name, id_ in ids.items() if id_ in names}


def check_text(text: object) -> None:
    """Refuse what is not text: other types, lone surrogates, more than `MAX_TEXT_BYTES`."""
    if not isinstance(text, str):
        raise InputError(f"text is of type {type(text).__name__}; give a string.")
    try:
        size = len(text) if len(text) > MAX_TEXT_BYTES else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InputError(
            f"text holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
            "it is half a character. Remove or repair it."
        ) from None
    if size > MAX_TEXT_BYTES:
        raise InputError(f"text has more than {MAX_TEXT_BYTES >> 20} MiB of UTF-8; shorten or split it.")


def _checked_ids(ids: Iterable[int]) -> Iterator[int]:
    for id_ in ids:
        if type(id_) is not int or not 0 <= id_ < 1 << 32:
            shown = hex(id_) if isinstance(id_, int) else f"of type {type(id_).__name__}"
            raise InputError(f"a token id is {shown[:20]}; ids are integers from 0 to 0xffffffff.")
        yield id_


def _named_specials(config: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """The special tokens of `tokenizer_config.json`: by their name in templates, and all of them."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    listed: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        more = config.get(key)
        if isinstance(more, dict):
            named |= more
        elif isinstance(more, list):
            listed += more
    names = {key: text for key, value in named.items() if (text := _content(value))}
    return names, {*names.values(), *(text for value in listed if (text := _content(value)))}


def _content(token: Any) -> str | None:
    """A special token stands as a string or as {"content": string}. Half a character is no token."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or any("\ud800" <= char <= "\udfff" for char in content):
        return None
    return content or None


def _build(raw: dict[str, Any]) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_str(json.dumps(raw))
    engine.no_truncation()
    engine.no_padding()
    # The text of a special token in user text is encoded as ordinary text.
    engine.encode_special_tokens = True
    return engine


def _is_bounded(raw: dict[str, Any]) -> bool:
    """Whether the characters of a text are those of its tokens: no normalizer may drop or join any."""
    normalizer, model = raw.get("normalizer"), raw.get("model") or {}
    keeps = normalizer is None or (
        normalizer.get("type") == "Replace"
        and len(normalizer["pattern"].get("String", "")) == 1
        and len(normalizer.get("content", "")) == 1
    )
    return keeps and model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def _check_decoder(file: Path, decoder: Any) -> None:
    """Incremental decoding needs tokens whose text does not depend on their neighbours, bytes excepted."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else [decoder]
    for step in steps:
        kind = step["type"] if isinstance(step, dict) else step
        one_character = kind == "Replace" and len(step["pattern"].get("String", "")) == 1
        if kind not in ("ByteFallback", "Fuse") and not one_character:
            raise CheckpointError(
                f"{file} decodes with {kind!r}; dgemma reads tokenizers of Gemma's kind, which decode with "
                "one-character Replace, ByteFallback and Fuse."
            )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def read_text(file: Path, *, max_bytes: int) -> str:
    """A small text file of a checkpoint, read with a size limit and typed errors."""
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{file} has {size} bytes; at most {max_bytes} are read. It is not such a file."
            )
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text; it is truncated or corrupt.") from None


def read_object(file: Path, *, max_bytes: int) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    return _object_of(read_text(file, max_bytes=max_bytes), str(file))


def _object_of(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where} is not valid JSON; it is truncated or corrupt.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object; it is corrupt.")
    return value
