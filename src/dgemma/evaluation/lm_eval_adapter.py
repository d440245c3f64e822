"""dgemma as a model of EleutherAI's `lm-eval`, which is imported when it is first used.

    python -m dgemma.evaluation.lm_eval_adapter run --model dgemma --model_args pretrained=DIR --tasks ...

is the command `lm_eval` with the model "dgemma" registered; `register()` does the same in your own program.
From Python: `lm_eval.simple_evaluate(model=DgemmaLM(lm), tasks=[...])`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dgemma.errors import DgemmaError, InputError

NAME = "dgemma"


def register() -> None:
    """Make `--model dgemma` known to lm-eval, in this process."""
    import_lm_eval("lm_eval.models")  # first its own models, which check what is registered
    registry = import_lm_eval("lm_eval.api.registry").model_registry
    if NAME not in registry:
        registry.register(NAME, target="dgemma.evaluation.lm_eval_model:DgemmaLM")


def import_lm_eval(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"lm-eval cannot be imported ({error}); `pip install lm-eval` installs it."
        ) from None


def main() -> int:
    """The command `lm_eval` with the model "dgemma"."""
    try:
        register()
        import_lm_eval("lm_eval.__main__").cli_evaluate()
    except DgemmaError as error:
        print(f"lm_eval: {error}", file=sys.stderr)
        return 1
    return 0


def __getattr__(name: str) -> Any:
    if name != "DgemmaLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_lm_eval("lm_eval")
    return importlib.import_module("dgemma.evaluation.lm_eval_model").DgemmaLM


if __name__ == "__main__":
    sys.exit(main())
