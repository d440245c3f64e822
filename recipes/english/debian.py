"""What Debian's archive says about each of its packages."""

from __future__ import annotations

import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from recipes.english.entry import Entry
from recipes.english.prose import is_sentence, kept_sentences, plain

SOURCE = "debian"
LISTS = Path("/var/lib/apt/lists")
_APT_HELPER = Path("/usr/lib/apt/apt-helper")
# Parts of larger packages: their descriptions repeat each other.
_PARTS = re.compile(
    r".*-(?:dev|dbg|dbgsym|doc|docs|data|common|l10n|headers|source|examples|plugins?|modules?|all|extra|full"
    r"|bin|tests|utils|java|locales?)$"
    r"|.*-(?:l10n|i18n|lang|help)-.*|(?:librust|golang|linux|task|education|texlive|gcc|g\+\+|libghc|gnat)-.*"
    r"|.*-cross.*|.*dictionar.*|(?:hunspell|myspell|aspell|hyphen|mythes|fonts|ttf|xfonts)-.*"
)
_BOILERPLATE = re.compile(
    r"(?:This|These|The) (?:(?:meta|dummy|transitional|empty|virtual) ?)?"
    r"(?:package|library package|dummy)s?\b"
    r"|Documentation for |Development |Install this|It contains|Please note|Note[: ]|See |For more|If you"
    r"|Homepage|Author|Upstream|\S+ (?:is|was) (?:written|created|developed|maintained) by"
)


def find_translations() -> Path:
    """The file of descriptions that `apt-get -o Acquire::Languages=en update` stores."""
    found = sorted(LISTS.glob("*_main_i18n_Translation-en*"), key=lambda file: file.stat().st_size)
    if not found:
        raise SystemExit(f"no descriptions below {LISTS}: apt-get -o Acquire::Languages=en update")
    return found[-1]


def _content(file: Path) -> bytes:
    """Unpacked by apt's own tool, which knows how apt stores its lists (on some machines as lz4)."""
    if not _APT_HELPER.exists():
        return lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    return subprocess.run([_APT_HELPER, "cat-file", file], check=True, stdout=subprocess.PIPE).stdout


def debian_entries(file: Path) -> Iterator[Entry]:
    for stanza in _content(file).decode("utf-8").split("\n\n"):
        found = re.match(r"Package: (\S+)\n(?:.*\n)*?Description-en: (.+)\n((?: .*\n?)*)", stanza)
        if found and not _PARTS.fullmatch(found[1]) and (text := described(found[1], found[2], found[3])):
            yield Entry(SOURCE, found[1], text, f"What is {found[1]}?")


def described(name: str, title: str, body: str) -> str:
    """A sentence that the title makes, then the prose of the body."""
    paragraphs = []
    for paragraph in re.split(r"\n \.\n", body.removesuffix("\n")):
        # Lines that stand further in are lists.
        if re.search(r"^ {2,}", paragraph, re.MULTILINE) or _BOILERPLATE.match(paragraph.strip()):
            continue
        if text := kept_sentences(paragraph):
            paragraphs.append(text)
    return (
        "\n".join([*([opening] if (opening := opened(name, title)) else []), *paragraphs])
        if paragraphs
        else ""
    )


def opened(name: str, title: str) -> str:
    """ "0ad", "real-time strategy game" -> "0ad is a real-time strategy game."; else empty."""
    title = plain(title).rstrip(".")
    first = title.split()[0] if title else ""
    if re.search(r" - |: |\(.*\)|,", title) or not re.match("[A-Za-z]", first):
        return ""
    if first.lower() in ("a", "an", "the"):
        text = first.lower() + title[len(first) :]
    elif first.endswith("s") or re.search(r"(?:ing|ed|ly)$", first) or title.split()[-1].endswith("s"):
        return ""  # plural, or a verb: no article fits
    else:
        lowered = (
            title if first[1:2].isupper() or not first[0].isupper() else first.lower() + title[len(first) :]
        )
        text = f"{'an' if lowered[0] in 'aeiou' else 'a'} {lowered}"
    sentence = f"{name} is {text}."
    is_plain = is_sentence(sentence[0].upper() + sentence[1:])
    return sentence if is_plain and re.fullmatch(r"[a-z][a-z0-9+-]*", name) else ""
