"""The bill of materials names our version, what we require, and what npm put into the page."""

from __future__ import annotations

import json

import dgemma
from tools.make_lock import ROOT
from tools.make_sbom import completed, direct_names


def test_the_bill_has_our_version_and_the_packages_of_the_page() -> None:
    package_lock = json.loads((ROOT / "web" / "package-lock.json").read_text())
    sbom = {
        "metadata": {"component": {"bom-ref": "root", "name": "dgemma"}},
        "components": [{"bom-ref": "L1", "name": "numpy"}, {"bom-ref": "L2", "name": "mpmath"}],
        "dependencies": [{"ref": "root"}, {"ref": "L1"}, {"ref": "L2"}],
    }
    found = completed(sbom, package_lock)
    svelte = package_lock["packages"]["node_modules/svelte"]["version"]
    assert found["metadata"]["component"]["version"] == dgemma.__version__
    assert found["components"][2]["purl"] == f"pkg:npm/svelte@{svelte}"
    assert found["dependencies"][0] == {"ref": "root", "dependsOn": ["L1", f"pkg:npm/svelte@{svelte}"]}
    assert found["dependencies"][3] == {"ref": f"pkg:npm/svelte@{svelte}"}


def test_direct_dependencies_are_those_of_users() -> None:
    names = direct_names()
    assert {"torch", "fastapi", "ray", "triton", "lm-eval"} <= names
    assert not names & {"dgemma", "pytest", "zensical"}
