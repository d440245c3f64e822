"""What is built and installed: one version, extras that name each other, the same bytes from anywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import dgemma
from sizes import IS_FULL

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

# docs/install.md says why `all` is without them.
NOT_IN_ALL = {"all", "ray", "cuda", "docs", "dev"}

# Weights, records and figures make the builds slow, and are files like all others.
HEAVY = () if IS_FULL else ("*.safetensors", "*.xz", "*.svg", "*.jsonl", "*.png")


def build(target: str, tree: Path, out: Path, umask: int = 0o022, **env: str) -> Path:
    """Build a wheel or an sdist of a tree, without a network, and return the file."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)],
        cwd=tree, umask=umask, env=os.environ | env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def unpack(sdist: Path, target: Path, umask: int) -> Path:
    before = os.umask(umask)
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(target, filter="data")
    finally:
        os.umask(before)
    (tree,) = target.iterdir()
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("copy") / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".*_cache", ".hypothesis", "build", "dist", "node_modules", *HEAVY
    )
    return Path(shutil.copytree(ROOT, target, ignore=ignored))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_same_bytes_from_any_directory_umask_and_sdist(
    tmp_path: Path, sdist: Path, wheel: Path
) -> None:
    elsewhere = unpack(sdist, tmp_path / "elsewhere", umask=0o077)
    for file in elsewhere.rglob("*.py"):
        os.utime(file, (0, 0))
    again = build("wheel", elsewhere, tmp_path / "out", umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_sdist_has_the_same_bytes_when_built_from_itself(tmp_path: Path, sdist: Path) -> None:
    again = build("sdist", unpack(sdist, tmp_path / "tree", umask=0o077), tmp_path / "out", umask=0o077)
    assert again.read_bytes() == sdist.read_bytes()


def test_the_sdist_has_what_building_and_testing_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    missing = {Path(name) for name in tracked.stdout.splitlines()} - {Path(name) for name in names}
    assert not [path for path in missing if path.parts[0] != ".ci" and not any(map(path.match, HEAVY))]
    assert names >= {
        "tests/conftest.py",
        "tools/build_docs.py",
        "deploy/grafana-dashboard.json",
        "SECURITY.md",
    }


def test_the_wheel_has_the_package_and_its_data_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops <= {"dgemma", f"dgemma-{dgemma.__version__}.dist-info", f"dgemma-{dgemma.__version__}.data"}
    pages = f"dgemma-{dgemma.__version__}.data/data/share/man/man1/"
    assert {"dgemma/py.typed", "dgemma/data/models/text/config.json", f"{pages}dgemma.1"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]


def test_there_is_one_version(wheel: Path) -> None:
    version = dgemma.__version__
    command = Path(sys.executable).with_name("dgemma")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"dgemma {version}\n"
    assert wheel.name == f"dgemma-{version}-py3-none-any.whl"
    for page in ("README.md", "docs/index.md"):
        assert set(re.findall(r"dgemma-(\d[\w.]*)-py3", (ROOT / page).read_text())) == {version}
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] == version


def test_the_extra_all_has_every_extra_that_one_machine_uses() -> None:
    (entry,) = EXTRAS["all"]
    named = re.fullmatch(r"dgemma\[(.*)\]", entry)
    assert named is not None
    assert set(named[1].split(",")) == EXTRAS.keys() - NOT_IN_ALL
