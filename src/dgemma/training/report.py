"""Reports of a training run: one per step, one per held-out evaluation, and the log of them.

The log is `log.jsonl` in the run's directory, one JSON object per line. Curves are drawn from it. A crash
loses at most the line that was being written. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from dgemma.durable_files import LineFile, whole_lines, write_whole
from dgemma.errors import CheckpointError, InputError

LOG_NAME = "log.jsonl"
NOISE_BINS = 5
NOISE_LABELS = tuple(f"{k / NOISE_BINS:.1f}-{(k + 1) / NOISE_BINS:.1f}" for k in range(NOISE_BINS))
"""The ranges of the noise level t, as labels."""


def noise_bin(t: float) -> int:
    """The bin of noise level `t`, of NOISE_BINS equal ones over 0 to 1."""
    if not 0 <= t <= 1:
        raise InputError(f"the noise level is {t!r}; it must be a number from 0 to 1.", field="t")
    return min(int(t * NOISE_BINS), NOISE_BINS - 1)


def duration(seconds: float) -> str:
    """Human-readable: 45s, 12m, 3h12m, 2d3h."""
    if not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24}h"


@dataclass(frozen=True, kw_only=True)
class _Losses:
    """The fields that training and held-out reports share."""

    kind: ClassVar[str]

    step: int
    """The number of steps done, including this one; 0 before the first step."""
    diffusion: float
    encoder: float
    diffusion_by_noise: tuple[float | None, ...]
    """The mean diffusion loss of each of NOISE_BINS noise levels; None: no example had this level."""
    examples: int
    """Presentations so far in training, where an example counts in each epoch; or examples evaluated."""
    seconds: float
    """Of this step, or of this evaluation."""

    def __post_init__(self) -> None:
        if len(self.diffusion_by_noise) != NOISE_BINS:
            raise InputError.about(
                "diffusion_by_noise",
                f"has {len(self.diffusion_by_noise)} values; it must have {NOISE_BINS}: None where no "
                "example is.",
            )

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`, in strict JSON."""
        return {"kind": self.kind, **_strict(asdict(self))}


@dataclass(frozen=True, kw_only=True)
class StepReport(_Losses):
    """One step of the optimizer."""

    kind: ClassVar[str] = "step"

    num_steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Trained tokens so far."""
    tokens_per_second: float
    """Smoothed."""
    eta_s: float | None
    reward: float | None = None
    """The mean of the paths' rewards, with objective: reward."""
    path_steps: float | None = None
    """The mean number of steps of the paths."""

    def scalars(self) -> dict[str, float]:
        """Values by their TensorBoard tag."""
        return {
            "loss/total": self.loss,
            "loss/diffusion": self.diffusion,
            "loss/encoder": self.encoder,
            **_named_bins("diffusion_by_noise", self.diffusion_by_noise),
            "optimizer/learning_rate": self.learning_rate,
            "optimizer/grad_norm": self.grad_norm,
            "speed/tokens_per_second": self.tokens_per_second,
            **({} if self.reward is None else {"reward/mean": self.reward}),
            **({} if self.path_steps is None else {"reward/path_steps": self.path_steps}),
        }


@dataclass(frozen=True, kw_only=True)
class HeldOutReport(_Losses):
    """One held-out evaluation, after `step` steps."""

    kind: ClassVar[str] = "held_out"

    def scalars(self) -> dict[str, float]:
        """Values by their TensorBoard tag."""
        return {
            "held_out/diffusion": self.diffusion,
            "held_out/encoder": self.encoder,
            **_named_bins("held_out_by_noise", self.diffusion_by_noise),
        }


TrainingReport = StepReport | HeldOutReport


class RunLog:
    """The log of a run, open for writing. `start_step`: the step that a resumed run continues after."""

    def __init__(self, run_dir: Path, *, start_step: int = 0) -> None:
        self.path = run_dir / LOG_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _drop_after(self.path, start_step)
            self._file = LineFile(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, report: TrainingReport) -> None:
        line = json.dumps(report.to_json(), allow_nan=False).encode() + b"\n"
        try:
            self._file.append(line)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def sync(self) -> None:
        """Force the log to disk."""
        try:
            self._file.sync()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        with suppress(OSError):  # a full disk was reported already
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: Path) -> list[TrainingReport]:
    """All reports of a log, in order. An incomplete last line, left by a crash, is ignored."""
    try:
        return [report for _, report in _lines(path)]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Give the log of a run that has begun."
        ) from error


def _drop_after(path: Path, step: int) -> None:
    """Remove the reports after `step`, which a resumed run writes again, and an incomplete last line."""
    if not path.exists():
        return
    # From step 0 every report is written again, including the held-out evaluation before the first step.
    kept = [line + b"\n" for line, report in _lines(path) if report.step <= step] if step else []
    write_whole(path, b"".join(kept))  # not in place: a crash here must not lose the lines that are kept


def _lines(path: Path) -> list[tuple[bytes, TrainingReport]]:
    content = path.read_bytes()
    whole = whole_lines(content)
    found = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            found.append((line, _parsed(line)))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"{path}, line {number}, is {line[:60]!r}; it must be a report in JSON. "
                "Something else wrote into this file: remove that line."
            ) from error
    try:
        # Only the newline may be missing.
        return [*found, (content[len(whole) :], _parsed(content[len(whole) :]))]
    except (ValueError, TypeError, KeyError, OverflowError):
        return found


def _parsed(line: bytes) -> TrainingReport:
    raw = json.loads(line)
    kind = {kind.kind: kind for kind in (StepReport, HeldOutReport)}[raw["kind"]]
    values = {
        # Logs of earlier versions lack the fields with a default.
        field.name: raw[field.name] if field.default is MISSING else raw.get(field.name, field.default)
        for field in fields(kind)
    }
    return kind(**{field.name: _READERS[str(field.type)](values[field.name]) for field in fields(kind)})


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in _NOT_FINITE):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _number_or_none(value: Any) -> float | None:
    return None if value is None else _number(value)


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_READERS: dict[str, Callable[[Any], Any]] = {  # by a field's annotation
    "int": _integer,
    "float": _number,
    "float | None": _number_or_none,
    "tuple[float | None, ...]": lambda values: tuple(map(_number_or_none, values)),
}


def _strict(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON, which has no NaN: other programs must be able to read the log of a diverging run."""
    return {
        name: [_finite(v) for v in value] if isinstance(value, tuple) else _finite(value)
        for name, value in raw.items()
    }


def _finite(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _named_bins(prefix: str, bins: tuple[float | None, ...]) -> dict[str, float]:
    pairs = zip(NOISE_LABELS, bins, strict=True)
    return {f"{prefix}/{label}": value for label, value in pairs if value is not None}


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written: {error.strerror}. Free some space, or choose another directory."
    )
