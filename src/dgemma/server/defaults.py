"""What a server does where a request says nothing: --default, for the sampler and for thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.params import PRESETS, GenerationParams
from dgemma.server.http.errors import ApiError
from dgemma.server.http.settings import Default
from dgemma.server.protocol import ReplyFields
from dgemma.server.text import TextService
from dgemma.server.validation import read_fields

THINKING = "thinking"
# Fields of a request that become options of a generation, and that no other field depends on.
SAMPLING = (
    "temperature", "top_p", "top_k", "preset", "acceptance", "max_denoising_steps", "t_min", "t_max",
    "entropy_bound", "min_confidence", "accept_per_step", "stability_threshold", "confidence_threshold",
    "decode", "draft_steps", "verify_threshold",
)  # fmt: skip
NAMES = (*SAMPLING, THINKING)
_PRESET_OPTIONS = tuple(sorted({name for preset in PRESETS.values() for name in preset}))


@dataclass(frozen=True, kw_only=True)
class RequestDefaults:
    """The options of --default, checked."""

    sampling: Mapping[str, Any]  # by the name of the request's field
    thinking: bool = False

    def params(self, checkpoint: GenerationParams) -> GenerationParams:
        """The checkpoint's defaults, changed by this server's."""
        return GenerationParams.make(checkpoint, **self.sampling)

    def check_thinking(self, text: TextService) -> None:
        """Raise if the model's chats know no thinking: each of them would be refused."""
        if self.thinking:
            try:
                text.render_chat([{"role": "user", "content": "Hello"}], thinking=True)
            except InputError as error:
                raise InputError(f"--default {THINKING}: {error}") from None


def read_defaults(defaults: Sequence[Default]) -> RequestDefaults:
    """Checked by what checks a request."""
    given: dict[str, Any] = {}
    for default in defaults:
        name = default.name
        if name not in NAMES:
            raise InputError(
                f"--default {name[:60]!r} has no default of its own{suggestion(name[:60], NAMES)} "
                f"Names: {', '.join(NAMES)}."
            )
        if name in given:
            raise InputError(f"--default {name} is given twice; give one value.")
        if default.value is None:
            raise InputError(f"--default {name} is null; give a value.")
        given[name] = default.value
    thinking = given.pop(THINKING, False)
    if not isinstance(thinking, bool):
        raise InputError(f"--default {THINKING} is {thinking!r}; give true or false.")
    try:
        request = read_fields(ReplyFields, {"model": "any", **given}, {})
        sampling = {name: getattr(request, name) for name in given}
        GenerationParams.make(**sampling)
    except (ApiError, InputError) as error:
        raise InputError(f"--default {error}") from None
    return RequestDefaults(sampling=sampling, thinking=thinking)


def without_presets(defaults: GenerationParams, checkpoint: GenerationParams) -> GenerationParams:
    """`defaults` under a preset of the request's own: what presets set is the checkpoint's again."""
    return replace(defaults, **{name: getattr(checkpoint, name) for name in _PRESET_OPTIONS})
