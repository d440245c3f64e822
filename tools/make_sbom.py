"""Write the software bill of materials (CycloneDX): locked packages, and those of the wheel's page.

    python -m tools.make_sbom

cyclonedx-bom runs in an environment of its own, which uv makes. The same lock gives the same bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dgemma import __version__
from tools.make_lock import LOCK, ROOT

TOOL = "cyclonedx-bom==7.5.0"
# Of all npm packages only this one's code is in the page that the wheel has.
IN_THE_PAGE = ("svelte",)
NOT_LOCKED = ("docs", "dev")


def direct_names() -> set[str]:
    """The packages that pyproject.toml names for the extras of the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra, found in project["optional-dependencies"].items():
        lines += found if extra not in NOT_LOCKED else []
    return {canonicalize_name(Requirement(line).name) for line in lines} - {"dgemma"}


def completed(sbom: dict[str, Any], package_lock: dict[str, Any]) -> dict[str, Any]:
    """`sbom` with what pyproject.toml leaves to other files: our version, and the page's packages."""
    component = sbom["metadata"]["component"]
    component |= {"version": __version__, "purl": f"pkg:pypi/dgemma@{__version__}"}
    direct = direct_names()
    needed = [entry["bom-ref"] for entry in sbom["components"] if entry["name"] in direct]
    for name in IN_THE_PAGE:
        version = package_lock["packages"][f"node_modules/{name}"]["version"]
        purl = f"pkg:npm/{name}@{version}"
        sbom["components"].append(
            {"bom-ref": purl, "type": "library", "name": name, "version": version, "purl": purl}
        )
        sbom["dependencies"].append({"ref": purl})
        needed.append(purl)
    (root,) = (entry for entry in sbom["dependencies"] if entry["ref"] == component["bom-ref"])
    root["dependsOn"] = sorted(needed)
    return sbom


def main() -> int:
    done = subprocess.run(
        [
            sys.executable, "-m", "uv", "tool", "run", "--quiet", "--from", TOOL,
            "cyclonedx-py", "requirements", str(LOCK), "--pyproject", "pyproject.toml",
            "--output-reproducible", "--output-format", "JSON",
        ],
        cwd=ROOT, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    package_lock = json.loads((ROOT / "web" / "package-lock.json").read_text())
    sbom = completed(json.loads(done.stdout), package_lock)
    target = ROOT / "dist" / f"dgemma-{__version__}.cdx.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(sbom, indent=1) + "\n")
    print(f"{len(sbom['components'])} components in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
