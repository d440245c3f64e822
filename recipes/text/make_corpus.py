"""English technical text to learn from, and chats about Python, from documentation that Debian installs.

    apt install python3-doc linux-doc cmake-data     # and what every Debian has: the GNU manuals, Python
    python -m recipes.text.make_corpus --out data/text

Writes `train/SOURCE/NAME.txt` and `held_out/SOURCE/NAME.txt`, `chats/train.jsonl` and `chats/held_out.jsonl`,
and `SOURCES.md`, which says whose text it is. A document is held out as a whole, by a hash of its name; what
the chats say of a name is held out with the document that describes it. The same packages give the same
bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from recipes.text.chats import make_chats
from recipes.text.document import SPLITS, Document
from recipes.text.rst import clean_rst, tidy, titles_of_labels

OUT = Path("data/text")
USR = Path("/usr")
MIN_DOCUMENT = 400  # characters
MIN_PARAGRAPH = 80  # shorter paragraphs may repeat: "Example:", "Return value:"
MAX_REPEATS = 2
MIN_LETTERS = 0.5  # of what is no space; tables of numbers have fewer
MAX_FOREIGN = 0.1  # share of non-ASCII characters; translations have more

# Manuals below share/info, and their packages.
GNU_MANUALS = {
    "coreutils": "coreutils",
    "diffutils": "diffutils",
    "ed": "ed",
    "find": "findutils",
    "gettext": "gettext",
    "grep": "grep",
    "gzip": "gzip",
    "rluserman": "readline-common",
    "sed": "sed",
    "time": "time",
    "wget": "wget",
}
ALLOWED_SPDX = re.compile(r"GPL-2\.0.*|GFDL-.*|CC-BY-\d.*|MIT|BSD-.*")


@dataclass(frozen=True)
class Source:
    """Documents below one directory of /usr; the highest version where there are several."""

    name: str
    root: str  # with * for the version
    packages: tuple[str, ...]  # with * for the same
    read: Callable[[Path], Iterable[tuple[str, str]]]  # names and raw texts
    clean: Callable[[str, Mapping[str, str]], str]
    licence: str

    def documents(self, usr: Path) -> list[Document]:
        _, root = self._newest(usr)
        return [Document(self.name, *item) for item in self.read(root)] if root else []

    def installed(self, usr: Path) -> list[str]:
        """Packages with their versions."""
        version, _ = self._newest(usr)
        names = [name.replace("*", version) for name in self.packages]
        return [f"{name} {package_version(name)}" for name in names]

    def _newest(self, usr: Path) -> tuple[str, Path | None]:
        pattern = re.compile(re.escape(self.root).replace(r"\*", r"([\d.]+)"))
        found: list[tuple[list[int], str, Path]] = []
        for root in usr.glob(self.root):
            if match := pattern.fullmatch(root.relative_to(usr).as_posix()):  # not python3.11-venv
                version = "".join(match.groups())
                found.append(([int(number) for number in re.findall(r"\d+", version)], version, root))
        return max(found)[1:] if found else ("", None)


def package_version(name: str) -> str:
    program = shutil.which("dpkg-query")
    call = [program or "", "--show", "--showformat", "${Version}", name]
    asked = subprocess.run(call, capture_output=True, text=True, check=False) if program else None
    return asked.stdout if asked and asked.stdout else "of unknown version"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"(default: {OUT})")
    parser.add_argument(
        "--usr", type=Path, default=USR, help=f"where packages are installed (default: {USR})"
    )
    args = parser.parse_args()
    make_corpus(args.usr, args.out)


def make_corpus(usr: Path, out: Path) -> None:
    cleaned = [document for source in SOURCES for document in cleaned_documents(source, usr)]
    documents = list(without_repeats(cleaned))
    if not documents:
        sys.exit(f"no documentation below {usr}; on Debian: apt install python3-doc linux-doc")
    for directory in (out / split / source.name for split in SPLITS for source in SOURCES):
        shutil.rmtree(directory, ignore_errors=True)  # nothing of an earlier run may stay
    for document in documents:
        file = out / document.split / document.source / f"{document.name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        assert not file.exists(), file
        file.write_text(document.text, encoding="utf-8")
    (out / "SOURCES.md").write_text(describe_sources(usr, documents), encoding="utf-8")
    chats = make_chats([document for document in documents if document.source == "python-docs"])
    (out / "chats").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats[split]]
        (out / "chats" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(size_table(documents))
    print(f"chats: {len(chats['train']):,} to learn from, {len(chats['held_out']):,} held out")


def size_table(documents: Sequence[Document]) -> str:
    rows = [f"{'':14}{'train':>22}{'held out':>22}", f"{'':14}" + f"{'documents':>10}{'characters':>12}" * 2]
    for name in [*(source.name for source in SOURCES), "all"]:
        row = f"{name:14}"
        for split in SPLITS:
            texts = [d.text for d in documents if d.split == split and name in (d.source, "all")]
            row += f"{len(texts):>10,}{sum(map(len, texts)):>12,}"
        rows.append(row)
    return "\n".join(rows)


# What is read.


def files_below(root: Path) -> Iterator[tuple[Path, str]]:
    """Every regular file with its text, in order; names are as before a packager's gzip."""
    for file in sorted(root.rglob("*")):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            if file.suffix == ".gz":
                content, file = gzip.decompress(content), file.with_suffix("")
            try:
                yield file.relative_to(root), content.decode("utf-8-sig")
            except UnicodeDecodeError:
                yield file.relative_to(root), content.decode("latin-1")


def flat(path: Path) -> str:
    return re.sub(r"\s", "_", ".".join(path.parts)).removesuffix(".txt")


def read_rst(root: Path) -> Iterator[tuple[str, str]]:
    for path, text in files_below(root):
        kept = "".join(path.suffixes[-2:]).endswith((".rst", ".rst.txt"))
        if kept and path.name != "changelog.rst.txt" and path.parts[0] != "release":
            yield flat(path), text


def read_kernel(root: Path) -> Iterator[tuple[str, str]]:
    for path, text in files_below(root):
        # The interfaces below ABI are prose in files without a suffix; features/ holds tables.
        kept = path.suffix in (".rst", ".txt") or path.parts[0] == "ABI"
        left_out = path.parts[0] in ("translations", "features") or "changelog" in path.name.lower()
        if kept and not left_out and is_allowed(spdx(text)):
            yield flat(path), text


def read_stdlib(root: Path) -> Iterator[tuple[str, str]]:
    left_out = {"test", "tests", "idlelib", "pydoc_data", "encodings", "site-packages", "dist-packages"}
    for path, text in files_below(root):
        tables = path.name.startswith("_sysconfigdata") or "-linux-" in path.parts[0]
        made = re.search(r"auto(?:matically |-?)generated|file is generated", text[:600], re.IGNORECASE)
        if path.suffix == ".py" and not left_out & set(path.parts) and not tables and not made:
            yield flat(path), text


def read_info(root: Path) -> Iterator[tuple[str, str]]:
    """The manuals that put themselves under the GNU Free Documentation License, without exceptions."""
    parts: dict[str, str] = {}
    for path, text in files_below(root):
        stem = path.as_posix().partition(".info")[0]
        if stem in GNU_MANUALS:
            parts[stem] = parts.get(stem, "") + text
    for stem, text in parts.items():
        head = " ".join(text[:3000].split())
        if "GNU Free Documentation License" in head and "with no Invariant Sections" in head:
            yield stem, text


def spdx(text: str) -> str:
    found = re.search(r"SPDX-License-Identifier:\s*(.+)", text[:2000])
    return found[1].split("*/")[0].split("-->")[0].strip() if found else ""


def is_allowed(expression: str) -> bool:
    """Whether one of the offered licences may be chosen; without an SPDX line the kernel's own holds."""
    offers = re.split(r"\s+or\s+", expression.strip("() "), flags=re.IGNORECASE)
    return not expression or any(
        all(ALLOWED_SPDX.fullmatch(part.strip("() ")) for part in re.split(r"\s+and\s+", offer, flags=re.I))
        for offer in offers
    )


# How it is cleaned.


def cleaned_documents(source: Source, usr: Path) -> Iterator[Document]:
    documents = source.documents(usr)
    titles = titles_of_labels(document.raw for document in documents)
    for document in documents:
        text = tidy(source.clean(tidy(document.raw), titles))
        if is_english_prose(text):
            yield replace(document, text=text)


def is_english_prose(text: str) -> bool:
    letters = len(re.sub(r"[\W\d_]+", "", text))
    dense = len(re.sub(r"\s+", "", text))
    foreign = len(re.sub(r"[\x00-\x7f]+", "", text))
    return len(text) >= MIN_DOCUMENT and letters >= MIN_LETTERS * dense and foreign <= MAX_FOREIGN * dense


def without_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Long paragraphs stay where they stand first and second; what is learned from is not held out again."""
    seen: Counter[bytes] = Counter()
    for document in sorted(documents, key=lambda document: SPLITS.index(document.split)):
        paragraphs = []
        for paragraph in re.findall(r"(?:.+\n)+\n*", document.text):
            normal = re.sub(r"[\W_]+", " ", paragraph.lower()).strip()
            if len(normal) > MIN_PARAGRAPH:
                key = sha256(normal.encode()).digest()
                if seen[key] >= (MAX_REPEATS if document.split == "train" else 1):
                    continue
                seen[key] += 1
            paragraphs.append(paragraph)
        if is_english_prose(text := tidy("".join(paragraphs))):
            yield replace(document, text=text)


def clean_kernel(text: str, titles: Mapping[str, str]) -> str:
    """As other reStructuredText; people's addresses are nothing to learn."""
    lines = re.compile(r"^(?:.*SPDX-License-Identifier|Contact:|Maintainers?:|Authors?:).*\n", re.MULTILINE)
    return clean_rst(lines.sub("", text), titles)


def clean_info(text: str, titles: Mapping[str, str]) -> str:
    """The nodes without menus, indices and the licence."""
    kept = []
    for node in text.split("\x1f")[1:]:
        header, _, body = node.lstrip("\n").partition("\n")
        name = re.search(r"Node: ([^,\n]*)", header)
        if name and not re.search("^Top$|Index|License|Copying", name[1]):
            body = re.sub(
                r"^\* (?:Menu:|[^\n]*::)[^\n]*\n(?:[ \t]{20,}\S[^\n]*\n)*", "", body, flags=re.MULTILINE
            )
            kept.append(re.sub(r"\u2018([^\u2019\n]+)\u2019", r"`\1`", body))
    return "\n".join(kept)


def clean_code(text: str, titles: Mapping[str, str]) -> str:
    return text


SOURCES = (
    Source(
        "python-docs",
        "share/doc/python3.*/html/_sources",
        ("python3.*-doc",),
        read_rst,
        clean_rst,
        "Python's documentation. PSF License Version 2; the code in it also under the Zero-Clause BSD "
        "licence. Copyright 2001-2023 Python Software Foundation; 2000 BeOpen.com; 1995-2000 Corporation for "
        "National Research Initiatives; 1991-1995 Stichting Mathematisch Centrum.",
    ),
    Source(
        "kernel-docs",
        "share/doc/linux-doc-*/Documentation",
        ("linux-doc-*",),
        read_kernel,
        clean_kernel,
        "The Linux kernel's documentation. GPL-2.0 where a file does not say otherwise in its SPDX line, "
        "counted below. Copyright Linus Torvalds and many others, named in the files.",
    ),
    Source(
        "cmake-docs",
        "share/cmake-*/Help",
        ("cmake-data",),
        read_rst,
        clean_rst,
        "CMake's manual. BSD-3-Clause. Copyright 2000-2022 Kitware, Inc., Insight Software Consortium, and "
        "contributors.",
    ),
    Source(
        "gnu-manuals",
        "share/info",
        tuple(sorted(set(GNU_MANUALS.values()))),
        read_info,
        clean_info,
        "Manuals of GNU programs. GNU Free Documentation License 1.2 or 1.3 or later, with no Invariant "
        "Sections, as the first page of each says. Copyright Free Software Foundation, Inc.",
    ),
    Source(
        "stdlib",
        "lib/python3.*",
        ("libpython3.*-stdlib", "libpython3.*-minimal"),
        read_stdlib,
        clean_code,
        "Python's standard library: its .py files without tests and tables. PSF License Version 2. Copyright "
        "2001-2023 Python Software Foundation, and those named in the files.",
    ),
)


def describe_sources(usr: Path, documents: Sequence[Document]) -> str:
    lines = [
        "# Whose text this is",
        "",
        "Made by `python -m recipes.text.make_corpus` from files of the Debian packages named here: cleaned,",
        "and without paragraphs that repeat. Their licences hold for it.",
    ]
    for source in SOURCES:
        if any(document.source == source.name for document in documents):
            lines += ["", f"## {source.name}", "", source.licence, ""]
            lines += [f"- {package}" for package in source.installed(usr)]
    kinds = Counter(spdx(document.raw) for document in documents if document.source == "kernel-docs")
    lines += ["", "## SPDX lines in kernel-docs", "", "| files | licence |", "|---:|---|"]
    lines += [
        f"| {count} | {kind or 'none'} |"
        for kind, count in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
