"""reStructuredText as a reader sees it: prose, and code in backticks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_BODY = r"(?:\1[ \t]+\S.*\n|[ \t]*\n)*"
# Directives without text of their own, or whose text is for the program that typesets.
_WITHOUT_TEXT = (
    "audit-event|cmake-module|codeauthor|contents|cssclass|currentmodule|flat-table|highlight|image|include|index"
    "|kernel-abi|kernel-doc|kernel-figure|kernel-include|literalinclude|meta|module|moduleauthor|only|raw"
    "|sectionauthor|tabularcolumns|testsetup|toctree"
)
_DIRECTIVE = re.compile(rf"^([ \t]*)\.\. (?:{_WITHOUT_TEXT})::.*\n{_BODY}", re.MULTILINE)
_COMMENT = re.compile(rf"^([ \t]*)\.\. (?![\[|]|[\w:+-]+::).*\n{_BODY}", re.MULTILINE)
_ROLE = re.compile(r"(?<![\w:]):(?:[\w+-]+:)?([\w+-]+):`([^`]+)`")
_CODE = re.compile(r"(?<!`)``([^`\n]+(?:\n[^`\n]+)?)``(?!`)")
_LINK = re.compile(r"`([^`<>]+?)\s*<[^<>`]+>`__?|`([^`\n]+)`__?(?!\w)")
_FOOTNOTE = re.compile(r"(?:\\ |\s)*\[#?[\w-]*\]_(?!\w)")
_LABEL = re.compile(
    r"^\.\. _([^:\n`]+):\n+(?:\.\. .*\n+)*(?:[=\-*#~^+\"]{3,}\n)?(\S.*)\n[=\-*#~^+\"]{3,}$", re.MULTILINE
)
# Roles that read as prose; all others name something, which reads as code.
_PROSE_ROLES = {"ref": "", "doc": "", "numref": "", "term": "", "dfn": "", "abbr": "", "sup": "", "sub": "",
                "guilabel": "", "menuselection": "", "strong": "", "emphasis": "", "title": "", "cite": "",
                "pep": "PEP ", "rfc": "RFC ", "issue": "issue ", "manual": "", "generator": ""}  # fmt: skip


def titles_of_labels(texts: Iterable[str]) -> dict[str, str]:
    """What a reference to a label shows: the title that the label stands before."""
    return {label.lower(): inline(title, {}) for text in texts for label, title in _LABEL.findall(text)}


def clean_rst(text: str, titles: Mapping[str, str]) -> str:
    return inline(_COMMENT.sub("", _DIRECTIVE.sub("", text)), titles)


def inline(text: str, titles: Mapping[str, str]) -> str:
    """Roles, literals and links as a reader sees them: prose, and code in backticks."""

    def shown(role: re.Match[str]) -> str:
        kind, content = role[1].lower(), " ".join(role[2].split())
        if titled := re.fullmatch(r"(.+?)\s*<[^<>]+>", content):
            return titled[1] if kind in _PROSE_ROLES else f"`{titled[1]}`"
        if kind in ("ref", "doc", "numref"):
            return titles.get(content.lower(), re.sub(r"[-_]", " ", content.rsplit("/")[-1]))
        if kind in _PROSE_ROLES:
            return _PROSE_ROLES[kind] + content
        if content.startswith("~"):
            content = content.rsplit(".")[-1]
        content = content.lstrip("!~.") or content
        return f"`{content}()`" if kind in ("func", "meth") and "(" not in content else f"`{content}`"

    text = _ROLE.sub(shown, text)
    text = _LINK.sub(lambda link: link[1] or link[2], text)
    return _FOOTNOTE.sub("", _CODE.sub(r"`\1`", text))


def tidy(text: str) -> str:
    text = re.sub(r"\r\n?|\f", "\n", text)
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1e\x7f]", "", text)  # \x1f parts the nodes of info files
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
