"""The text recipe: what is read, what is left out, what is held out, and a tokenizer that gives text back."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.text.tokenizer import Tokenizer
from recipes.text import make_corpus as corpus_module
from recipes.text.chats import answer_of, entries, make_chats
from recipes.text.document import Document
from recipes.text.make_corpus import is_allowed, is_english_prose, make_corpus, without_repeats
from recipes.text.make_tokenizer import BUNDLED, COMPANIONS, MAX_SPACES, SPACE, make_tokenizer
from recipes.text.rst import inline

LICENCE = (
    "Permission is granted to anyone to use this text, for any purpose, and to change and pass it on freely."
)
PAGE = """\
:mod:`page{number}` --- A module
==============================

.. module:: page{number}
   :synopsis: Nothing

.. index:: single: nonsense

**Source code:** :source:`Lib/page{number}.py`

--------------

The :mod:`page{number}` module wraps text of kind {number}, which :ref:`other <label>` modules leave alone.

.. function:: wrap(text, width=70, \\*, \\
                   tabs=True)

   Wraps the paragraph in *text* (a :class:`str`) so that no line has more than ``width`` characters of
   kind {number}. *Not* all lines are `full <https://example.org>`_. See :func:`fill`. For example::

      wrap("code {number}")

.. class:: Wrapper{number}()

   A wrapper that keeps its :term:`options <option>` of kind {number}, for many paragraphs of text.

   .. method:: reset()

      See :meth:`wrap`.

   .. method:: fill(text)

      .. deprecated:: 3.0

      Fills one paragraph of kind {number} and returns what came of it as a single string\\ [1]_.

.. exception:: Error{number}

   Raised when there is a word of kind {number} that is longer than the line it should stand in.
"""
GLOSSARY = """\
.. glossary::

   generator
      A function which returns a :term:`generator iterator`, as a few others do as well in their way.

   bytecode
      Python source code is compiled into bytecode, the internal form of a program in the interpreter.
"""


def text_of(number: int, length: int = 12) -> str:
    """Prose of its own kind."""
    return "".join(
        f"Sentence {word} of number {number} says something about the matter.\n\n" for word in range(length)
    )


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    usr = tmp_path / "usr"
    files = {
        f"share/doc/python3.11/html/_sources/library/page{number}.rst.txt": PAGE.format(number=number)
        for number in range(120)
    }
    files |= {"share/doc/python3.11/html/_sources/glossary.rst.txt": GLOSSARY + text_of(500)}
    kernel = "share/doc/linux-doc-6.1/Documentation"
    head = f".. SPDX-License-Identifier: GPL-2.0\n\n{LICENCE}\n\n"
    files |= {f"{kernel}/admin/page{number}.rst.gz": head + text_of(number) for number in range(120)}
    files |= {
        f"{kernel}/{name}.gz": content
        for name, content in {
            "translations/it/page.rst": text_of(200),
            "scsi/ChangeLog.txt": text_of(201),
            "secret.rst": ".. SPDX-License-Identifier: Proprietary\n\n" + text_of(202),
            "either.rst": ".. SPDX-License-Identifier: (LGPL-2.1 OR BSD-2-Clause)\n\n" + text_of(203),
            "short.rst": "Too short.",
            "numbers.txt": "0x1234 5678 9abc def0\n" * 100,
            "ABI/testing/sysfs-thing": "Contact:\tAda <ada@example.org>\n" + text_of(204),
        }.items()
    }
    files |= {
        "share/doc/linux-doc-5.10/Documentation/old.rst.gz": text_of(205),
        "lib/python3.11/wrap.py": text_of(206),
        "lib/python3.11/test/test_wrap.py": text_of(207),
        "lib/python3.11/token.py": "# Auto-generated\n" + text_of(208),
    }
    for name, content in files.items():
        file = usr / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return usr


def contents(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def chats(out: Path, split: str) -> list[tuple[str, str]]:
    lines = (out / "chats" / f"{split}.jsonl").read_text().splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    assert all([message["role"] for message in talk] == ["user", "assistant"] for talk in talks)
    return [(talk[0]["content"], talk[1]["content"]) for talk in talks]


def test_the_same_packages_give_the_same_bytes(usr: Path, tmp_path: Path) -> None:
    make_corpus(usr, tmp_path / "one")
    make_corpus(usr, tmp_path / "two")
    (tmp_path / "two/train/stdlib").mkdir(exist_ok=True)
    (tmp_path / "two/train/stdlib/of-an-earlier-run.txt").write_text("")
    make_corpus(usr, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_documents_are_held_out_whole_and_the_rest_is_left_out(usr: Path, tmp_path: Path) -> None:
    make_corpus(usr, tmp_path)
    train, held_out = (
        {file.name for file in (tmp_path / split).rglob("*.txt")} for split in ("train", "held_out")
    )
    assert train.isdisjoint(held_out)
    assert 1 <= len(held_out) <= 20
    kept = train | held_out
    assert {"admin.page7.rst.txt", "either.rst.txt", "library.page7.rst.txt", "wrap.py.txt"} <= kept
    assert not [
        name
        for name in kept
        if re.search("translat|ChangeLog|secret|short|numbers|old|test_wrap|token", name)
    ]
    interface = next(tmp_path.glob("*/kernel-docs/ABI.testing.sysfs-thing.txt"))
    assert "ada@example.org" not in interface.read_text()


def test_a_licence_that_stands_everywhere_is_kept_twice_and_never_held_out(usr: Path, tmp_path: Path) -> None:
    make_corpus(usr, tmp_path)
    found = [file for file in tmp_path.glob("*/*/*.txt") if LICENCE in file.read_text()]
    assert [file.relative_to(tmp_path).parts[0] for file in found] == ["train", "train"]


def test_paragraphs_are_the_same_where_only_spaces_and_signs_differ() -> None:
    names = [name for name in map(str, range(200)) if Document("s", name, "").split == "train"][:4]
    texts = [f"{text_of(number)}{' ' * number}{LICENCE.replace(',', ' ;' * number)}\n" for number in range(4)]
    documents = [Document("s", name, "", text) for name, text in zip(names, texts, strict=True)]
    kept = list(without_repeats(documents))
    assert ["Permission" in document.text for document in kept] == [True, True, False, False]


def test_the_sources_are_named(usr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module.shutil, "which", lambda name: None)
    make_corpus(usr, tmp_path)
    said = (tmp_path / "SOURCES.md").read_text()
    assert "- linux-doc-6.1 of unknown version\n" in said
    assert "| 1 | (LGPL-2.1 OR BSD-2-Clause) |\n" in said
    assert "cmake" not in said


def test_nothing_installed_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="apt install"):
        make_corpus(tmp_path, tmp_path / "out")


def test_no_chat_asks_in_training_for_what_is_held_out(usr: Path, tmp_path: Path) -> None:
    make_corpus(usr, tmp_path)
    train, held_out = chats(tmp_path, "train"), chats(tmp_path, "held_out")
    assert held_out
    assert {question for question, _ in train}.isdisjoint(question for question, _ in held_out)
    pages = {match[0] for question, _ in held_out if (match := re.search(r"page\d+", question))}
    assert pages
    assert not [question for question, _ in train if set(re.findall(r"page\d+", question)) & pages]


def test_chats_are_plain_text(usr: Path, tmp_path: Path) -> None:
    make_corpus(usr, tmp_path)
    for _, answer in chats(tmp_path, "train") + chats(tmp_path, "held_out"):
        prose = re.sub("`[^`]*`", "", answer)
        assert not re.search(r"[`*\\|_]|::|\.\. |:\w+:|See ", prose), answer
        assert len(answer) <= 400


def test_a_name_goes_to_one_side_even_where_both_describe_it() -> None:
    sides = {Document("python-docs", name, "").split: name for name in map(str, range(200))}
    pages = [Document("python-docs", name, PAGE.format(number=1)) for name in sides.values()]
    made = make_chats(pages)
    assert not made["train"]
    # What training would have told, had the name not been held out, is no test either.
    assert not made["held_out"]


def test_what_a_page_describes() -> None:
    found = {entry.name: entry for entry in entries(PAGE.format(number=3), {})}
    assert list(found) == ["page3", "page3.wrap", "page3.Wrapper3", "page3.Wrapper3.fill", "page3.Error3"]
    assert found["page3"].answer == (
        "The `page3` module wraps text of kind 3, which other modules leave alone."
    )
    assert found["page3.wrap"].answer == (
        "Wraps the paragraph in `text` (a `str`) so that no line has more than `width` characters of kind 3. "
        "Not all lines are full."
    )
    assert found["page3.wrap"].call == "page3.wrap(text, width=70, *, tabs=True)"
    assert found["page3.Wrapper3.fill"].answer.endswith("came of it as a single string.")
    assert found["page3.Error3"].kind == "raised"


def test_a_glossary_is_asked_with_articles_where_it_answers_with_one() -> None:
    kinds = {entry.name: entry.kind for entry in entries(GLOSSARY, {})}
    assert kinds == {"generator": "a term", "bytecode": "term"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (":func:`~os.path.join`", "`join()`"),
        (":meth:`!str.join`", "`str.join()`"),
        (":c:func:`kfree`", "`kfree()`"),
        (":class:`a list <list>`", "`a list`"),
        (":ref:`a section <label>`", "a section"),
        (":ref:`label`", "The Title"),
        (":pep:`8` and ``code``", "PEP 8 and `code`"),
        ("`a page <https://example.org>`__", "a page"),
        ("so be it [#note-1]_.", "so be it."),
    ],
)
def test_roles_are_shown_as_a_reader_sees_them(text: str, shown: str) -> None:
    assert inline(text, {"label": "The Title"}) == shown


@pytest.mark.parametrize(
    "text",
    ["See :func:`x` for all that there is to know about it.", "Short.", "The following are known there::"],
)
def test_some_paragraphs_answer_nothing(text: str) -> None:
    assert answer_of([text], "", {}) == ""


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("", True), ("GPL-2.0-only", True), ("(GPL-2.0+ OR CC-BY-4.0)", True), ("LGPL-2.1", False),
        ("LGPL-2.1 OR MIT", True), ("MIT AND LGPL-2.1", False), ("GPL-2.0 WITH Linux-syscall-note", True),
    ],
)  # fmt: skip
def test_licences(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) == allowed


def test_english_prose_has_letters_of_english() -> None:
    assert is_english_prose(text_of(0))
    assert not is_english_prose("1 2 3 4 abc " * 100)
    assert not is_english_prose("документация ядра " * 100)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    corpus = tmp_path_factory.mktemp("corpus")
    (corpus / "chats").mkdir()
    (corpus / "chats/train.jsonl").write_text("")
    (corpus / "train").mkdir()
    text = Path(corpus_module.__file__).read_text() + "\tcafé" * 200
    (corpus / "train/code.txt").write_text(text)
    make_tokenizer(corpus, corpus / "tokenizer", 1000)
    assert all(
        (corpus / "tokenizer" / name).read_bytes() == (BUNDLED / name).read_bytes() for name in COMPANIONS
    )
    return Tokenizer.from_directory(corpus / "tokenizer")


texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.integers(0, 70).map(lambda length: " " * length),
        st.sampled_from(
            ["\t", "\r\n", "\n\n\n", "🙂", "é", "the", "return", "<|turn>", "<0x0A>", "42", "\x00", "=="]
        ),
    ),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(texts)
@example("a\r\n\tb  🙂\n\n    def f(x):\n        return 1234  # naïve 日本")
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.controls.values())
    assert tokenizer.decode(ids) == text.replace(SPACE, " ")  # the vocabulary's own spelling of a space


def test_controls_are_the_bundled_ones(tokenizer: Tokenizer) -> None:
    bundled = Tokenizer.from_directory(BUNDLED)
    assert tokenizer.controls == bundled.controls
    assert tokenizer.template_names == bundled.template_names
    assert tokenizer.vocab_size == 1000
    assert [tokenizer.id_to_token(id_) for id_ in (107, 107 + 255)] == ["<0x00>", "<0xFF>"]


@pytest.mark.parametrize("length", range(2, MAX_SPACES + 1))
def test_a_run_of_spaces_is_one_piece_and_leaves_the_word_alone(tokenizer: Tokenizer, length: int) -> None:
    ids = tokenizer.encode(" " * length + "return")
    assert [tokenizer.id_to_token(id_) for id_ in ids[:1]] == [SPACE * length]
    assert ids[1:] == tokenizer.encode("return")


def test_pieces_keep_within_words_lines_and_digits(tokenizer: Tokenizer) -> None:
    for id_ in range(107 + 256 + MAX_SPACES - 1, tokenizer.vocab_size):
        piece = tokenizer.id_to_token(id_)
        assert piece
        assert re.fullmatch(rf"{SPACE}?[^\W\d_]+|{SPACE}?[\W_]+|\d", piece), piece
        assert "\n" not in piece or set(piece) == {"\n"}
        assert SPACE not in piece[1:]
    assert [tokenizer.id_to_token(id_) for id_ in tokenizer.encode("x 203")] == ["x", SPACE, "2", "0", "3"]
