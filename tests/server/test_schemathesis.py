"""Schemathesis reads the description of a real server and asks all that it allows, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from server.real_server import serving, write_adapters, write_model

KEY = "a-key"
# One short canvas per answer, and gaps that end when their time is up: hundreds of answers take seconds.
LIMITS = ("--max-model-len", "64", "--max-choices", "2", "--request-timeout", "0.1")
# What has the described form may still be unanswerable: a chat that ends with the assistant's turn.
NOT_CHECKED = "positive_data_acceptance"


def test_nothing_the_description_allows_or_forbids_makes_a_5xx_or_an_undescribed_reply(
    tmp_path: Path,
) -> None:
    """The borders of every field, then drawn requests: replies have a described status, type and form, what
    breaks the description is refused, and nothing is open without a key."""
    model = write_model(tmp_path / "tiny", steps=1)
    adapters = write_adapters(model, tmp_path / "adapters")
    named = ("--adapter", f"sums={adapters['sums']}")
    with serving(str(model), *LIMITS, *named, environment={"DGEMMA_API_KEY": KEY}) as server:
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json",
                "--header", f"Authorization: Bearer {KEY}", "--phases", "coverage,fuzzing",
                "--checks", "all", "--exclude-checks", NOT_CHECKED, "--max-examples", "20", "--seed", "1",
                "--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none",
                "--warnings", "off", "--no-color",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        statuses = Counter(entry["status"] for entry in server.log() if entry["event"] == "request")
    assert not [status for status in statuses if status >= 500]
    # It came to the engine, and it came to many refusals.
    assert statuses[200] > 200
    assert statuses[400] > 500
