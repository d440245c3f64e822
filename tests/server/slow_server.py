"""A server process for the tests of signals: `python -m server.slow_server FILE`.

No answer goes on until there is FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dgemma.server.http.settings import Settings
from dgemma.server.run import serve
from server.fake_engine import FakeEngine, FakeText, Script

if __name__ == "__main__":
    script = Script(text="x" * 100, until=Path(sys.argv[1]).exists)
    serve(Settings(port=0, drain_timeout_s=600), FakeEngine(script), FakeText())
