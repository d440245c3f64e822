"""How many random cases a slow test runs: all that the docs name with `make test-full`, else a part."""

from __future__ import annotations

import os

import pytest

IS_FULL = os.environ.get("DGEMMA_FULL") == "1"


def cases(full: int, part: int) -> int:
    return full if IS_FULL else part


GRAPH_BACKEND = "aot_eager" if IS_FULL else "eager"
"""The compiler backend of tests that demand one graph: dynamo alone finds a graph break."""

full = pytest.mark.skipif(not IS_FULL, reason="make test-full")
"""Of a test that takes too long for every change, and whose invariant a shorter one guards in part."""
