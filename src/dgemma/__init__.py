"""dgemma: block-diffusion language models, first of all DiffusionGemma, run exactly.

Names are imported on first use, so that `import dgemma` and `dgemma --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dgemma.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    DgemmaError,
    InputError,
    TrainingError,
)
from dgemma.events import Answer, Commit, Draft, Finish, FinishReason
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.params import GenerationParams, Pin, StartingCanvas

if TYPE_CHECKING:
    from dgemma.forms.extraction import Extraction
    from dgemma.language_model import LanguageModel
    from dgemma.loading import load
    from dgemma.model.kv_cache import KVCache
    from dgemma.model.lora import LoraSettings
    from dgemma.sampling.sampler import Sampler
    from dgemma.tasks.calibration import Calibration
    from dgemma.tasks.decide import Choice, Decision, Question
    from dgemma.tasks.edit import Edited
    from dgemma.tasks.infill import Filled
    from dgemma.trace.trace import Trace

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "Calibration",
    "CheckpointError",
    "Choice",
    "Commit",
    "ConfigError",
    "Decision",
    "DeviceError",
    "DgemmaError",
    "Draft",
    "Edited",
    "Extraction",
    "Filled",
    "Finish",
    "FinishReason",
    "GenerationParams",
    "InputError",
    "KVCache",
    "LanguageModel",
    "LayerKind",
    "LoraSettings",
    "ModelConfig",
    "Pin",
    "Question",
    "Sampler",
    "StartingCanvas",
    "Trace",
    "TrainingError",
    "__version__",
    "load",
]

_LAZY = {
    "Calibration": "dgemma.tasks.calibration",
    "Choice": "dgemma.tasks.decide",
    "Decision": "dgemma.tasks.decide",
    "Edited": "dgemma.tasks.edit",
    "Extraction": "dgemma.forms.extraction",
    "Filled": "dgemma.tasks.infill",
    "KVCache": "dgemma.model.kv_cache",
    "LanguageModel": "dgemma.language_model",
    "LoraSettings": "dgemma.model.lora",
    "Question": "dgemma.tasks.decide",
    "Sampler": "dgemma.sampling.sampler",
    "Trace": "dgemma.trace.trace",
    "load": "dgemma.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
