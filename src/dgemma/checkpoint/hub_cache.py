"""The models in the local hub cache: list and delete them. Imports no torch, and uses no network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.checkpoint.bundled import PREFIX
from dgemma.checkpoint.hub import EXAMPLE_NAME, is_hub_name, missing_weights
from dgemma.checkpoint.source import read_config
from dgemma.errors import CheckpointError, DgemmaError, InputError, suggestion

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy, HFCacheInfo

_MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model of the cache that dgemma can read.

    revision: of `path`: "main" if it is there, since the bare name means it, else the newest.
    nbytes: of all revisions. last_used: seconds since 1970, as the file system records it.
    missing: the weight files that `path` lacks.
    """

    name: str
    path: Path
    revision: str
    nbytes: int
    last_used: float
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """All revisions of a model, still to be deleted."""

    name: str
    path: Path
    num_revisions: int
    nbytes: int
    _strategy: DeleteCacheStrategy

    def execute(self) -> None:
        with _silent_hub():
            self._strategy.execute()
        if self.path.exists():
            raise CheckpointError(
                f"{self.name} could not be deleted wholly: {self.path} is still there. Check its permissions."
            )


def cache_directory() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_models() -> list[CachedModel]:
    """The models whose config.json dgemma reads, by name."""
    info = _scan()
    repos = () if info is None else info.repos
    found = (_cached_model(repo) for repo in repos if repo.repo_type == "model")
    return sorted((model for model in found if model is not None), key=lambda model: model.name)


def plan_deletion(name: str) -> Deletion:
    """What `dgemma rm` would delete. Only the hub cache is ever touched."""
    if name.startswith(PREFIX):
        raise InputError(f"{name} is part of the package; it goes with it: pip uninstall dgemma.")
    if os.path.exists(os.path.expanduser(name)):
        raise InputError(
            f"{name} is a path here; only models of the hub cache are deleted. Remove it yourself, or change "
            "to another directory if you mean the hub's model of this name."
        )
    if not is_hub_name(name):
        raise InputError(f"{name!r} is not a hub name; give owner/name, for example {EXAMPLE_NAME}.")
    info = _scan()
    repos = {} if info is None else {r.repo_id: r for r in info.repos if r.repo_type == "model"}
    if info is None or name not in repos:
        raise CheckpointError(_not_there(name, list(repos)))
    repo = repos[name]
    # Only this repository: a copy of it under another name may have the same commits.
    strategy = replace(info, repos=frozenset([repo])).delete_revisions(
        *(revision.commit_hash for revision in repo.revisions)
    )
    broken_off = sum(f.size_on_disk for f in info.incomplete_files if repo.repo_path in f.file_path.parents)
    return Deletion(
        name=name,
        path=repo.repo_path,
        num_revisions=len(repo.revisions),
        nbytes=strategy.expected_freed_size + broken_off,
        _strategy=strategy,
    )


def _scan() -> HFCacheInfo | None:
    """None if there is no cache yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(cache_directory())
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the hub cache {cache_directory()} cannot be read: {error}") from None


def _cached_model(repo: CachedRepoInfo) -> CachedModel | None:
    if not repo.revisions or not is_hub_name(repo.repo_id):
        return None
    revision = max(repo.revisions, key=lambda revision: (_MAIN in revision.refs, revision.last_modified))
    try:
        read_config(revision.snapshot_path)
        missing = missing_weights(revision.snapshot_path)
    except DgemmaError:  # another library's model, or one without a configuration
        return None
    names = sorted(revision.refs, key=lambda ref: (ref != _MAIN, ref))
    return CachedModel(
        name=repo.repo_id,
        path=revision.snapshot_path,
        revision=names[0] if names else revision.commit_hash,
        nbytes=repo.size_on_disk,
        last_used=_last_used(repo, revision),
        missing=tuple(missing),
    )


def _last_used(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> float:
    """Of the weights: config.json is read by every listing."""
    weights = [file for file in revision.files if file.file_name.endswith(".safetensors")]
    return max((file.blob_last_accessed for file in weights), default=repo.last_modified)


def _not_there(name: str, known: list[str]) -> str:
    damaged = cache_directory() / f"models--{name.replace('/', '--')}"
    if damaged.exists():
        return f"the copy of {name} in the cache is damaged; remove the directory {damaged} yourself."
    return f"{name} is not in the hub cache{suggestion(name, known)} `dgemma list` shows what is."


@contextmanager
def _silent_hub() -> Iterator[None]:
    """huggingface_hub logs a traceback for each file that it cannot delete; our error is one line."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
