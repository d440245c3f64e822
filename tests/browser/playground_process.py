"""A real `dgemma play` on the bundled models, and a browser for it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def playing(*flags: str) -> Iterator[str]:
    """-> the address."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dgemma.cli.main",
            "play",
            "--no-open",
            "--port",
            "0",
            "--threads",
            "1",
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^/\s]+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
