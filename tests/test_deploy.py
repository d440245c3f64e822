"""The deployment files name options and modules that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from dgemma.server.http.settings import LoadOptions, Settings

DEPLOY = Path(__file__).parents[1] / "deploy"
KNOWN = {"model", *(entry.name for kind in (Settings, LoadOptions) for entry in fields(kind))}


def applications(name: str) -> list[dict[str, Any]]:
    found = yaml.safe_load((DEPLOY / name).read_text())
    if "spec" in found:
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    return list(found["applications"])


@pytest.mark.parametrize("name", ["serve-config.yaml", "ray-service.yaml"])
def test_an_application_has_only_options_of_the_server(name: str) -> None:
    (application,) = applications(name)
    assert application["import_path"] == "dgemma.ray:app"
    assert application["args"].keys() <= KNOWN
    values = {key: value for key, value in application["args"].items() if key in Settings.__annotations__}
    Settings(**values)


def test_the_documentation_names_the_files() -> None:
    page = (DEPLOY.parent / "docs" / "scale.md").read_text()
    assert set(re.findall(r"deploy/([a-z-]+\.yaml)", page)) == {"serve-config.yaml", "ray-service.yaml"}
