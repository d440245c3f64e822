"""For all tests: no deadlines for examples, a signal that arrives, and one compiler per test process."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# A hypothesis example may take as long as a busy machine makes it take, and so may making one.
settings.register_profile("dgemma", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dgemma")

# A shell lets its background jobs ignore this signal, and the commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Test processes share the cores already: torch's pool of compiler processes would only cost their start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The longest files, longest first: begun last, one of them would leave the other processes without work.
LONGEST = (
    "parity/test_generation_equals_oracle.py",
    "training/test_trainer.py",
    "parity/test_transformer_equals_oracle.py",
    "engine/test_batch_equals_alone.py",
    "server/test_load.py",
    "test_documented_server.py",
    "server/test_schemathesis.py",
    "engine/test_simulation.py",
    "training/test_shards.py",
    "scale/test_processes.py",
    "sampling/test_vocab_scan.py",
    "model/test_accelerators.py",
    "training/test_setup.py",
    "training/test_memory.py",
    "parity/test_training_equals_oracle.py",
    "parity/test_bf16_error.py",
    "evaluation/test_lm_eval_adapter.py",
    "cli/test_train.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.as_posix()
        return next((n for n, end in enumerate(LONGEST) if name.endswith(f"/tests/{end}")), len(LONGEST))

    items.sort(key=place)
