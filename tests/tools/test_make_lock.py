"""The lock files hold all that an install pulls, in tested versions, and name no place of one machine."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.make_lock import EXTRAS, LOCK, ROOT, SERVER_EXTRAS, SERVER_LOCK, TORCH, entries, installed_versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(path: Path) -> dict[str, Version]:
    names = (entry.split()[0].split("==") for entry in entries(path.read_text()))
    return {name: Version(version) for name, version in names}


def required(extras: tuple[str, ...]) -> list[Requirement]:
    """The requirements of the package with these extras, and of the extras that those name."""
    lines = list(PROJECT["dependencies"])
    todo = list(extras)
    while todo:
        for line in PROJECT["optional-dependencies"][todo.pop()]:
            requirement = Requirement(line)
            if requirement.name == "dgemma":
                todo += requirement.extras
            else:
                lines.append(line)
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize(("path", "extras"), [(LOCK, EXTRAS), (SERVER_LOCK, SERVER_EXTRAS)])
def test_a_lock_covers_what_pyproject_requires(path: Path, extras: tuple[str, ...]) -> None:
    found = locked(path)
    for requirement in required(extras):
        if path == SERVER_LOCK and requirement.name == "torch":
            assert "torch" not in found  # the Containerfile installs the build for the device
            continue
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), "run `make lock`"


def test_the_lock_covers_what_its_packages_require() -> None:
    found = locked(LOCK)
    num_checked = 0
    for name in found:
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another platform, or of an extra that is not installed here
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                num_checked += 1
                assert canonicalize_name(requirement.name) in found, f"{name} requires {requirement}"
    assert num_checked > 100


@pytest.mark.parametrize("path", [LOCK, SERVER_LOCK])
def test_every_locked_package_has_hashes_and_none_a_place(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"://| @ |^-|file:|index", text, re.MULTILINE)
    for entry in entries(text):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry
    assert len(entries(text)) == len(locked(path)) == len(re.findall(r"^\S+==", text, re.MULTILINE))


def test_the_servers_lock_is_a_part_of_the_whole_without_torch_and_its_cuda() -> None:
    whole, server = locked(LOCK), locked(SERVER_LOCK)
    assert server.items() <= whole.items()
    assert not [name for name in server if TORCH.match(f"{name}==")]
    assert [name for name in whole if name.startswith("nvidia-")]


def test_constraints_have_no_local_versions() -> None:
    assert "torch==2.13.0\n" in installed_versions()
    assert "+" not in installed_versions()
    assert "dgemma==" not in installed_versions()
