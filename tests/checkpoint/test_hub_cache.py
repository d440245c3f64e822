"""The cache is told as it is: what dgemma reads, what is incomplete. Deleting takes one model alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from dgemma.checkpoint.hub_cache import cached_models, plan_deletion
from dgemma.checkpoint.presets import PRESETS
from dgemma.errors import CheckpointError, InputError
from fake_hub import use_hub

CONFIG = json.dumps(PRESETS["tiny"].config.to_json()).encode()
OURS = {"config.json": CONFIG, "model.safetensors": b"w" * 1000}
COMMIT = "a" * 40
OTHER = "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home", offline=True)
    return Path(constants.HF_HUB_CACHE)


def put(
    cache: Path, name: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str | None = "main",
    kind: str = "models",
) -> Path:  # fmt: skip
    """A snapshot as huggingface_hub lays it out -> its directory."""
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for directory in (snapshot, repo / "blobs", repo / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = repo / "blobs" / f"{commit[0]}-{file}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    if ref is not None:
        (repo / "refs" / ref).write_text(commit)
    return snapshot


def test_without_a_cache_there_is_no_model(cache: Path) -> None:
    assert cached_models() == []
    cache.mkdir(parents=True)
    assert cached_models() == []


def test_only_what_dgemma_reads_is_listed(cache: Path) -> None:
    snapshot = put(cache, "someone/ours", OURS)
    put(cache, "someone/bert", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"w"})
    put(cache, "someone/empty", {"README.md": b"# nothing"})
    put(cache, "gpt2", OURS)  # no command takes a name without an owner
    put(cache, "someone/data", OURS, kind="datasets")
    (model,) = cached_models()
    assert (model.name, model.path, model.revision) == ("someone/ours", snapshot, "main")
    assert model.nbytes == len(CONFIG) + 1000
    assert model.missing == ()


def test_a_copy_without_all_weights_names_what_is_missing(cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "one.safetensors": b"w"}
    put(cache, "someone/half", files, ref=None)  # an interrupted pull has no name for its revision yet
    (model,) = cached_models()
    assert model.missing == ("two.safetensors",)
    assert model.revision == COMMIT


def test_the_revision_that_the_name_means_comes_first(cache: Path) -> None:
    main = put(cache, "someone/ours", OURS)
    put(cache, "someone/ours", {"config.json": CONFIG}, commit=OTHER, ref=None)  # newer, not complete
    (model,) = cached_models()
    assert (model.path, model.missing) == (main, ())
    assert model.nbytes == 2 * len(CONFIG) + 1000  # what deleting frees


def test_without_main_the_newest_revision_is_shown(cache: Path) -> None:
    old = put(cache, "someone/ours", OURS, ref="v1")
    new = put(cache, "someone/ours", OURS, commit=OTHER, ref="v2")
    for snapshot, seconds in ((old, 1000), (new, 2000)):
        for file in snapshot.iterdir():
            os.utime(file.resolve(), (seconds, seconds))
    (model,) = cached_models()
    assert (model.path, model.revision) == (new, "v2")


def test_listing_is_no_use(cache: Path) -> None:
    snapshot = put(cache, "someone/ours", OURS)
    os.utime((snapshot / "model.safetensors").resolve(), (5_000, 1_000))
    os.utime((snapshot / "config.json").resolve(), (9_000, 1_000))
    assert cached_models()[0].last_used == 5_000


def test_a_cache_that_is_a_file_is_an_error(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("")
    with pytest.raises(CheckpointError, match=r"the hub cache .*hub cannot be read"):
        cached_models()


def test_deleting_takes_all_revisions_and_says_what_is_freed(cache: Path) -> None:
    put(cache, "someone/ours", OURS)
    put(cache, "someone/ours", OURS, commit=OTHER, ref=None)
    repo = cache / "models--someone--ours"
    (repo / "blobs" / "c.incomplete").write_bytes(b"h" * 50)
    put(cache, "someone/other", OURS)
    deletion = plan_deletion("someone/ours")
    assert (deletion.num_revisions, deletion.nbytes) == (2, 2 * (len(CONFIG) + 1000) + 50)
    assert repo.exists()  # planning deletes nothing
    deletion.execute()
    assert not repo.exists()
    assert [model.name for model in cached_models()] == ["someone/other"]


@pytest.mark.parametrize("name", ["someone/ours", "someone/copy"])
def test_a_copy_with_the_same_commits_stays(cache: Path, name: str) -> None:
    put(cache, "someone/ours", OURS)
    put(cache, "someone/copy", OURS)
    plan_deletion(name).execute()
    assert [model.name for model in cached_models()] == [
        {"someone/ours": "someone/copy", "someone/copy": "someone/ours"}[name]
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("bundled:text", "bundled:text is part of the package"),
        ("here", "here is a path here; only models of the hub cache are deleted"),
        ("~", "~ is a path here"),
        ("not a name", "'not a name' is not a hub name; give owner/name, for example google/"),
        ("someone/uors", "someone/uors is not in the hub cache; did you mean 'someone/ours'"),
        ("nobody/nothing", r"nobody/nothing is not in the hub cache\. `dgemma list` shows"),
        ("someone/data", "someone/data is not in the hub cache"),
        (
            "someone/broken",
            "the copy of someone/broken in the cache is damaged; remove the directory .*broken",
        ),
    ],
)
def test_what_cannot_be_deleted_is_told_why(cache: Path, tmp_path: Path, name: str, problem: str) -> None:
    put(cache, "someone/ours", OURS)
    put(cache, "someone/data", OURS, kind="datasets")
    put(cache, "someone/broken", OURS)
    (cache / "models--someone--broken" / "blobs" / "a-model.safetensors").unlink()
    (tmp_path / "here").mkdir()
    before = sorted(cache.rglob("*"))
    with pytest.raises((InputError, CheckpointError), match=problem):
        plan_deletion(name)
    assert sorted(cache.rglob("*")) == before


def test_nothing_is_deleted_without_a_cache(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="someone/ours is not in the hub cache"):
        plan_deletion("someone/ours")


def test_files_that_cannot_be_deleted_are_one_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, "someone/ours", OURS)

    def refuse(path: object) -> None:
        raise PermissionError

    deletion = plan_deletion("someone/ours")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(CheckpointError, match=r"could not be deleted wholly: .*ours is still there"):
        deletion.execute()
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == level
