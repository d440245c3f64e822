"""Write the lock files: every package that an install pulls, in the version that was tested, with its hashes.

    python -m tools.make_lock

locks/requirements.txt is for `dgemma[all,ray,cuda]`, for Python 3.11 to 3.13 on any platform. What is
installed here is taken in the installed version, so that the lock is what the tests ran with; the rest is the
newest that fits. deploy/requirements.txt is the part that a server's container needs, without torch, whose
build depends on the device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "locks" / "requirements.txt"
SERVER_LOCK = ROOT / "deploy" / "requirements.txt"
EXTRAS = ("all", "ray", "cuda")
SERVER_EXTRAS = ("server", "vision", "otel")
TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEAD = "# Written by `make lock` for dgemma[{}], Python 3.11 to 3.13. Install with --require-hashes.\n"


def installed_versions() -> str:
    """Constraints: what is installed here. A local version such as 2.13.0+cpu is one of torch's builds."""
    return "".join(
        f"{found.name}=={found.version.partition('+')[0]}\n"
        for found in distributions()
        if found.name != "dgemma"
    )


def entries(lock: str) -> list[str]:
    """The packages of a lock file, each with its hashes."""
    return [entry for entry in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE) if "==" in entry]


def compiled(extras: tuple[str, ...], constraints: Path) -> list[str]:
    """What uv resolves for all platforms and versions of Python at once."""
    done = subprocess.run(
        [
            sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--universal", "--quiet",
            "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate",
            "--no-config", "--default-index", "https://pypi.org/simple",
            "--constraint", str(constraints), *(f"--extra={extra}" for extra in extras),
        ],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return entries(done.stdout)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "tested.txt"
        constraints.write_text(installed_versions())
        found = compiled(EXTRAS, constraints)
        LOCK.parent.mkdir(exist_ok=True)
        LOCK.write_text(HEAD.format(",".join(EXTRAS)) + "".join(found))
        server = [entry for entry in compiled(SERVER_EXTRAS, LOCK) if not TORCH.match(entry)]
        SERVER_LOCK.write_text(HEAD.format(",".join(SERVER_EXTRAS)) + "".join(server))
    print(f"{len(found)} packages in {LOCK}, {len(server)} in {SERVER_LOCK}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
