"""Fields of a request that have no effect, and fields that are refused unless they ask for the usual.

What is not in these tables and not a field of the request's model is unknown, and refused as such: no field
is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.errors import suggestion
from dgemma.server.api_error import refused, shown


@dataclass(frozen=True)
class Unsupported:
    """A field that other servers have."""

    why: str
    usual: tuple[Any, ...] = ()  # values that ask for nothing else than what happens anyway


_PENALTY = Unsupported("all words of a canvas are written at once, so none comes before another", (0,))
UNSUPPORTED_BY_ALL: dict[str, Unsupported] = {
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}
_GRAMMAR = Unsupported("grammars are not read; regex, choice, json_schema and json_object are", ("",))
_GRAMMARS = dict.fromkeys(("grammar", "guided_grammar"), _GRAMMAR)
UNSUPPORTED_IN_CHAT: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **_GRAMMARS,
    "audio": Unsupported("this model writes text only"),
    "function_call": Unsupported("it is replaced by tool_choice"),
    "functions": Unsupported("it is replaced by tools", ([],)),
    "modalities": Unsupported("this model writes text only", (["text"],)),
    "moderation": Unsupported("this server judges no texts"),
    "prediction": Unsupported("predicted outputs are not used yet"),
    "prompt_cache_options": Unsupported("what was read is kept as memory allows"),
    "prompt_cache_retention": Unsupported("what was read is kept as memory allows", ("in_memory",)),
    "realtime": Unsupported("all requests are served alike", (False,)),
    "reasoning_summary": Unsupported("the reasoning itself is in reasoning_content", (False,)),
    "reasoning_summary_wait": Unsupported("the reasoning itself is in reasoning_content", (False,)),
    "service_tier": Unsupported("all requests are served alike", ("auto", "default")),
    "store": Unsupported("this server keeps no answers", (False,)),
    "verbosity": Unsupported("say in a message how long the answer shall be", ("medium",)),
    "web_search_options": Unsupported("this server searches nothing"),
}
UNSUPPORTED_IN_COMPLETIONS: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **_GRAMMARS,
    "best_of": Unsupported("all answers are returned, see n", (1,)),
    "echo": Unsupported("the caller has the prompt", (False,)),
}
UNSUPPORTED_IN_FIM: dict[str, Unsupported] = {
    **UNSUPPORTED_IN_COMPLETIONS,
    "repetition_penalty": Unsupported(_PENALTY.why, (1,)),
}
_WHOLE_ONLY = Unsupported("the answer comes whole", (False,))
UNSUPPORTED_IN_EDIT: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    "n": Unsupported("there is one rewritten region", (1,)),
    "stop": Unsupported("the region is rewritten as a whole", ([],)),
    "stream": _WHOLE_ONLY,
}
UNSUPPORTED_IN_INFILL: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    "grammar": _GRAMMAR,
    "lora": Unsupported("an adapter is asked for by its name, as model", ([],)),
    "min_p": Unsupported("top_k and top_p are what limits the choice of words", (0,)),
    "n_probs": Unsupported("log-probabilities are not told here", (0,)),
    "repeat_penalty": Unsupported(_PENALTY.why, (1,)),
}
_CACHE_MODES: tuple[dict[str, str], ...] = (
    {}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"},
)  # fmt: skip
UNSUPPORTED_IN_DECISIONS: dict[str, Unsupported] = {
    "prompt_cache_options": Unsupported("what was read is kept as memory allows", _CACHE_MODES),
    "stream": _WHOLE_ONLY,
}
# Accepted, checked for their type, and without any effect on the answer.
NEUTRAL = ("user", "metadata", "safety_identifier", "prompt_cache_key")


def without_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Unsupported]) -> dict[str, Any]:
    """The body without the fields that ask for the usual; another value is refused by name."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule = unsupported.get(name)
        if rule is None:
            kept[name] = value
        elif not any(_same(value, usual) for usual in rule.usual):
            usually = f", or give {' or '.join(map(json.dumps, rule.usual))}" if rule.usual else ""
            raise refused(
                f"{name} is {shown(value)}, which is not supported: {rule.why}. Leave {name} out{usually}.",
                name,
                "unsupported_parameter",
            )
    return kept


def flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """Mercury's client sends its `extra_params` as an object named extra_body: more fields of the request."""
    extra = body.get("extra_body", {})
    if not isinstance(extra, dict):
        raise refused(f"extra_body is {shown(extra)}; it must be an object of more fields.", "extra_body")
    twice = sorted(extra.keys() & body.keys())
    if twice:
        raise refused(f"{twice[0]} is given in the body and in extra_body; give it once.", twice[0])
    fields = {name: value for name, value in body.items() if name != "extra_body"}
    return {**fields, **{name: value for name, value in extra.items() if value is not None}}


def unknown_field(path: str, known: Iterable[str]) -> Exception:
    """The refusal of a field that nobody knows; `path` is its name with those of the objects it is in."""
    name = path.rpartition(".")[2]
    hint = suggestion(name, known) if len(name) <= 60 else "."
    return refused(f"unknown field {shown(path)}{hint}", path[:100], "unknown_parameter")


def _same(value: object, usual: object) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(usual, bool) and value == usual
