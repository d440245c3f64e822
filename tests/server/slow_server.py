"""A server process for the tests of signals: `python -m server.slow_server SECONDS_PER_CANVAS`."""

from __future__ import annotations

import sys

from dgemma.server.http.settings import Settings
from dgemma.server.run import serve
from server.fake_engine import FakeEngine, FakeText, Script

if __name__ == "__main__":
    script = Script(text="x" * 100, delay_s=float(sys.argv[1]))
    serve(Settings(port=0, drain_timeout_s=60), FakeEngine(script), FakeText())
