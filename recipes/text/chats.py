"""Questions and answers about Python, taken from what its documentation says of each name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from textwrap import dedent

from recipes.text.document import SPLITS, Document
from recipes.text.rst import inline, tidy, titles_of_labels

ANSWER = range(40, 401)  # characters; an answer that has `ENOUGH` stays with the first paragraph
ENOUGH = 60


@dataclass(frozen=True)
class Entry:
    """Something the documentation describes."""

    name: str
    kind: str  # a key of QUESTIONS
    answer: str
    call: str = ""  # how it is called, if it is


QUESTIONS = {
    "call": ("What does {} do?", "Explain {}.", "What is {} for?", "Describe {}."),
    "class": ("What is {}?", "Explain {}.", "What is {} for?", "Describe {}."),
    "value": ("What is {}?", "Explain {}.", "What is {} for?", "Describe {}."),
    "raised": ("When is {} raised?", "What does {} mean?", "Explain {}."),
    "module": ("What is the {} module for?", "What does the {} module provide?", "Explain the {} module."),
    "term": ("What does {} mean in Python?", "Explain the term {}.", "Define {}."),
    "a term": ("What is a {}?", "Explain what a {} is.", "What does {} mean in Python?"),
}
CALLED = ("How is {} called?", "What arguments does {} take?", "What is the signature of {}?")
KINDS = {
    "call": r"(?:(?:abstract|awaitable|coroutine|class|static)?(?:function|method)|decorator|c:function)",
    "class": r"(?:class|exception|c:type|c:struct)",
    "value": r"(?:data|attribute|c:macro|c:var|c:member|envvar|opcode)",
}
_ENTRY = re.compile(r"( *)\.\. (?:py:)?([\w:]+):: *(\S.*)")
# How paragraphs and sentences begin that answer nothing.
_NO_ANSWER = re.compile(
    r"\(?(?:[Ss]ee|Refer to|Deprecated|Availability|Changed in|New in|Note)\b|\*\*Source code"
    r"| |\.\. |:\w+:(?!`)"  # what belongs to the paragraph before, directives, their options
)
# Sentences that need what stands around them.
_NOT_ALONE = re.compile(r".*:$|.*\b(?:see|\w+ed|table|as) (?:above|below|here)\b")
_MARKUP = re.compile(r"[`*|\\]|::|--|\.\. |\w_(?!\w)|:\w+:")  # outside of code
_QUOTED = re.compile("`[^`]*`")
_SENTENCE = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`(])")


def make_chats(pages: Sequence[Document]) -> dict[str, list[list[dict[str, str]]]]:
    """Questions about what the pages describe, with the first sentences they say of it, by split."""
    titles = titles_of_labels(page.raw for page in pages)
    found: dict[str, dict[str, Entry]] = {split: {} for split in SPLITS}
    for page in pages:
        for entry in entries(page.raw, titles):
            found[page.split].setdefault(entry.name, entry)
    held_out = found["held_out"]
    told = {entry.answer for entry in found["train"].values()}
    found["train"] = {name: entry for name, entry in found["train"].items() if name not in held_out}
    found["held_out"] = {name: entry for name, entry in held_out.items() if entry.answer not in told}
    return {split: [chat for entry in found[split].values() for chat in chats_of(entry)] for split in SPLITS}


def chats_of(entry: Entry) -> Iterator[list[dict[str, str]]]:
    asked = [(QUESTIONS[entry.kind], entry.answer)]
    if entry.call:
        asked.append((CALLED, f"`{entry.call}`"))
    for questions, answer in asked:
        chosen = questions[sha256(entry.name.encode()).digest()[0] % len(questions)].format(entry.name)
        if entry.kind == "a term":
            chosen = re.sub(r"\ba (?=[aeiou])", "an ", chosen)
        yield [{"role": "user", "content": chosen}, {"role": "assistant", "content": answer}]


def entries(page: str, titles: Mapping[str, str]) -> Iterator[Entry]:
    lines = tidy(page).expandtabs().splitlines()
    module = ""
    classes: list[tuple[int, str]] = []  # those the line stands in, with their indents
    own_classes: set[str] = set()
    for number, line in enumerate(lines):
        if line.strip() == ".. glossary::":
            yield from glossary(lines[number + 1 :], titles)
        if not (directive := _ENTRY.fullmatch(line)):
            continue
        indent, name = len(directive[1]), directive[2]
        while classes and classes[-1][0] >= indent:
            classes.pop()
        if name in ("module", "currentmodule"):
            module = directive[3]
            if name == "module" and (answer := answer_of(after_title(lines[number + 1 :]), "", titles)):
                yield Entry(module, "module", answer)
            continue
        kind = next((kind for kind, names in KINDS.items() if re.fullmatch(names, name)), "")
        if not kind:
            continue
        calls, body = described(lines, number, directive[3], indent)
        named = {re.sub(r"\(.*", "", call).split()[-1].strip("*;@") for call in calls}
        if len(named) > 1:  # one text for many names says little of each
            continue
        own = full = named.pop()
        if classes and not full.startswith(f"{classes[-1][1]}.") and name not in ("c:function", "c:macro"):
            full = f"{classes[-1][1]}.{full}"
        if kind == "class":
            classes.append((indent, full))
            own_classes.add(full)
        is_global = name.startswith("c:") or name in ("envvar", "opcode") or module in ("", "builtins")
        # datetime.date() is a method of the class datetime.datetime; asyncio.run() is of the module alone.
        if not is_global and (module in own_classes or not full.startswith(f"{module}.")):
            full = f"{module}.{full}"
        call = re.sub(r"\\([\\*])", r"\1", " ".join(calls[0].split()))
        answer = answer_of(body, call, titles)
        if not answer or not re.fullmatch(r"[\w.]+", full):
            continue
        if kind == "class" and answer.startswith("Raised "):
            kind = "raised"
        has_arguments = kind != "value" and re.search(r"\(.+\)", call) and len(call) < ANSWER.stop - len(full)
        yield Entry(full, kind, answer, call.replace(own, full, 1) if has_arguments else "")


def described(lines: Sequence[str], number: int, first: str, indent: int) -> tuple[list[str], list[str]]:
    """The ways to call what line `number` begins to describe, and the lines that describe it."""
    calls = [first]
    number += 1
    while number < len(lines) and re.match(rf" {{{indent + 1},}}[^\s:]", lines[number]):
        if calls[-1].endswith("\\"):
            calls[-1] = calls[-1][:-1] + lines[number].strip()
        else:
            calls.append(lines[number].strip())
        number += 1
    return calls, indented(lines[number:], indent)


def after_title(lines: Sequence[str]) -> list[str]:
    """A module's own text: up to the first heading or definition."""
    kept: list[str] = []
    for line in lines:
        if re.match(r"([=\-*~^])\1{3,}$", line) and kept and kept[-1]:
            break
        kept.append("" if re.match("-{4,}$", line) else line)
    return kept


def glossary(lines: Sequence[str], titles: Mapping[str, str]) -> Iterator[Entry]:
    for number, line in enumerate(lines):
        if re.match(r" {3}\w", line) and (answer := answer_of(indented(lines[number + 1 :], 3), "", titles)):
            is_a = re.fullmatch(" +[a-z].*[^s]", line) and re.match("An? ", answer)
            yield Entry(line.strip(), "a term" if is_a else "term", answer)


def indented(lines: Iterable[str], indent: int) -> list[str]:
    """The first lines, as far as they stand further right than `indent`."""
    inside = takewhile(lambda line: not line or line.startswith(" " * (indent + 1)), lines)
    return dedent("\n".join(inside)).splitlines()


def answer_of(lines: Sequence[str], call: str, titles: Mapping[str, str]) -> str:
    """The first sentences of the first paragraph, and of the next where that says too little."""
    answer = ""
    for paragraph in "\n".join(lines).split("\n\n"):
        paragraph = paragraph.strip("\n")
        if not paragraph or _NO_ANSWER.match(paragraph):
            continue
        if not re.match(r"[\w`:\"'(]|\*+\w", paragraph):
            break
        for sentence in _SENTENCE.split(plain(paragraph, call, titles)):
            if not _NO_ANSWER.match(sentence) and not _NOT_ALONE.match(sentence):
                if len(answer) + len(sentence) >= ANSWER.stop:
                    break
                answer = f"{answer} {sentence}".strip()
        if not answer or len(answer) >= ENOUGH:
            break
    is_whole = re.fullmatch(r"[A-Z`\"].*[.!?)]", answer) and answer.count("(") <= answer.count(")")
    is_plain = not _MARKUP.search(_QUOTED.sub("", answer))
    return answer if len(answer) in ANSWER and is_whole and is_plain else ""


def plain(text: str, call: str, titles: Mapping[str, str]) -> str:
    """Text without markup; an emphasised word is code where it is an argument."""
    arguments = set(re.findall(r"\w+", call))
    text = re.sub(r"(?<=[^`]`)\\(?=\w)", "", text.replace(r"\*", "\0"))  # `x`\s is a plural
    text = re.sub(r"\*\*([^*`]+)\*\*", r"\1", inline(text, titles))
    text = re.sub(
        r"(?<![\w*`])\*([^*`\s](?:[^*`]*[^*`\s])?)\*(?![\w*])",
        lambda word: f"`{word[1]}`" if word[1].strip("\0") in arguments else word[1],
        text,
    )
    text = re.sub(r"(?<![`\w])([A-Za-z]\w*[A-Za-z0-9])_(?=[\s.,;)])", r"\1", text)  # a link to a label
    text = re.sub(r"\\ |\\(?=[_`\\|])", "", text).replace("\0", "*")
    return re.sub(r"(?<=[\w ])---?(?=[\w ])", "-", " ".join(text.split()))
