"""Checkpoints by hub name: download `owner/name` to a local directory. Imports no torch.

Cache (HF_HOME), log-in (HF_TOKEN), address (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE) are those of
huggingface_hub, which is imported only for a hub name. This module adds: only files that dgemma reads are
fetched, never a pickle; an incomplete copy is not used; the free disk space is checked before the first byte;
and every failure is one sentence with a remedy.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.checkpoint.bundled import PREFIX, bundled_path
from dgemma.checkpoint.quantized.quantization_config import schemes_from_config
from dgemma.checkpoint.source import COMPANION_FILES, read_json, weights_path
from dgemma.errors import CheckpointError, ConfigError, InputError, suggestion
from dgemma.machine import size_text
from dgemma.model.config import ModelConfig

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Progress = Callable[[int, int], None]
"""Called with (bytes fetched so far, bytes to fetch in all)."""

EXAMPLE_NAME = "google/diffusiongemma-26B-A4B-it"
# The hub's own rule for names, so that this module reports a bad name.
_HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII)
_FILES = (".gguf", ".json", ".safetensors")  # a name that ends so is meant as a file
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = frozenset(("config.json", _INDEX, *COMPANION_FILES))
_MAX_PUBLISHED = 20
_OTHER_HUB = "set HF_ENDPOINT to a hub that can be reached"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True, kw_only=True)
class PullPlan:
    """The files of a snapshot, and those of them that `fetch` has to download."""

    name: str
    revision: str
    commit: str
    files: dict[str, int]  # bytes by file, in the order of fetching
    missing: frozenset[str]
    note: str = ""  # why the hub was not queried; the plan is then the copy in the cache

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def missing_bytes(self) -> int:
        return sum(self.files[file] for file in self.missing)


def resolve(
    name_or_path: str | Path, *, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """The path of a checkpoint: `bundled:NAME`, else an existing path, else the cache, else the hub.

    A complete copy in the cache is used without a query to the hub; `pull` checks for a newer one.
    Without `progress`, huggingface_hub draws its own bars on a terminal.
    """
    text = str(name_or_path)
    if text.startswith(PREFIX):
        return bundled_path(text.removeprefix(PREFIX))
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        if revision is not None:
            raise InputError.about(
                "revision", f"is {revision!r}, but {path} is a path; only a hub name has revisions."
            )
        return weights_path(path)
    like_a_path = text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1
    if like_a_path or text.endswith(_FILES) or isinstance(name_or_path, Path):
        what = "the path of the file" if text.endswith(_FILES) else "the directory of a checkpoint"
        raise CheckpointError(f"{path} does not exist{_suggestion(path)} Give {what}.")
    if not is_hub_name(text):
        raise CheckpointError(
            f"{text!r} is neither a directory here nor a hub name such as {EXAMPLE_NAME}{_suggestion(path)}"
        )
    try:
        return cached(text, revision=revision) or pull(text, revision=revision, progress=progress)
    except CheckpointError as error:
        near = _suggestion(path, otherwise="")
        if not near:
            raise
        raise CheckpointError(f"{error} Nor is {text} a directory here{near}") from error


def resolve_config(name_or_path: str | Path) -> Path:
    """`resolve`, but of a checkpoint that is not here only config.json is fetched."""
    text = str(name_or_path)
    if text.startswith(PREFIX) or os.path.exists(os.path.expanduser(text)) or not is_hub_name(text):
        return resolve(name_or_path)
    if (here := cached(text)) is not None:
        return here
    import httpx2
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    missing = f"{text} is neither a directory here nor in the local cache, and"
    try:
        # The library tries a download again for half a minute and says so each time; a query once.
        HfApi().model_info(text, revision=constants.DEFAULT_REVISION, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(text, "config.json")).parent
    except OfflineModeIsEnabled as error:
        remedy = "copy the checkpoint here and give its directory, or unset it"
        raise CheckpointError(f"{missing} HF_HUB_OFFLINE is set; {remedy}.") from error
    except httpx2.ConnectError as error:
        raise CheckpointError(
            f"{missing} {_unreachable(error)}; check the network, or {_OTHER_HUB}."
        ) from error
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:
        raise _hub_error(error, text, "main") from error


def is_hub_name(text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None and not text.endswith(_FILES)


def pull(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Query the hub for the newest snapshot of `revision` and fetch the missing files."""
    return fetch(plan_pull(name, revision=revision), progress)


def cached(name: str, *, revision: str | None = None) -> Path | None:
    """The snapshot in the local cache, if it is complete. No network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    complete = isinstance(config, str) and not missing_weights(Path(config).parent)
    return Path(str(config)).parent if complete else None


def plan_pull(name: str, *, revision: str | None = None) -> PullPlan:
    """Query the hub for files and sizes. If it cannot be reached, plan with a complete copy in the cache."""
    if not is_hub_name(name):
        raise CheckpointError(f"{name!r} is not a hub name; give owner/name, for example {EXAMPLE_NAME}.")
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    requested = revision or constants.DEFAULT_REVISION
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    try:
        info = HfApi().model_info(name, revision=requested, files_metadata=True, timeout=seconds)
        siblings = {s.rfilename: s for s in info.siblings or ()}
        commit = str(info.sha)
    except OfflineModeIsEnabled:
        return _plan_from_cache(name, requested, "HF_HUB_OFFLINE is set", "unset it")
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        return _plan_from_cache(name, requested, _unreachable(error), _OTHER_HUB)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _hub_error(error, name, requested) from error
    weights = sorted(f for f in siblings if f.endswith(".safetensors") and "/" not in f)
    if not weights or "config.json" not in siblings:
        lacking = "safetensors file" if not weights else "config.json"
        raise CheckpointError(f"{name} has no {lacking}; dgemma reads safetensors, never pickles.")
    # Weights last: a copy with all weights is then complete.
    files = sorted(_SMALL_FILES & siblings.keys()) + weights
    missing = frozenset(f for f in files if not _is_cached(name, commit, siblings[f]))
    sizes = {f: siblings[f].size or 0 for f in files}
    return PullPlan(name=name, revision=requested, commit=commit, files=sizes, missing=missing)


def is_on_hub(text: str) -> bool:
    """Whether `resolve` would look for it on the hub."""
    return is_hub_name(text) and not os.path.exists(text)


def published_quantized(name: str, *, float8: bool = True) -> list[PullPlan]:
    """Quantized forms of a model on the hub that dgemma reads; none where the hub does not answer.

    float8: also those with 8-bit floats, which Apple's GPU does not have.
    """
    import httpx2
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    found = []
    try:
        for model in HfApi().list_models(filter=f"base_model:quantized:{name}", limit=_MAX_PUBLISHED):
            try:
                config = read_json(Path(hf_hub_download(model.id, "config.json")))
                schemes = schemes_from_config(config)
                if schemes and (float8 or not any(scheme.uses_float8 for scheme in schemes)):
                    ModelConfig.from_json(config)  # refuses another architecture
                    found.append(plan_pull(model.id))
            except (RemoteEntryNotFoundError, RepositoryNotFoundError, CheckpointError, ConfigError):
                continue  # GGUF, gated, or a scheme that dgemma does not read
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError):
        return found
    return found


def fetch(plan: PullPlan, progress: Progress | None = None) -> Path:
    """Download the missing files, if the disk has space. An interrupt keeps the complete files."""
    import httpx2
    from huggingface_hub import constants, hf_hub_download

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if plan.missing_bytes > free:
        raise CheckpointError(
            f"{plan.name} needs {size_text(plan.missing_bytes)}, {place} has {size_text(free)} free. "
            "Free some space, or set HF_HOME to a directory on a larger disk."
        )
    bar = None if progress is None else _bar(progress, plan.missing_bytes)
    try:
        # One after the other in this thread: Ctrl-C stops at once and loses one incomplete file.
        paths = [hf_hub_download(plan.name, f, revision=plan.commit, tqdm_class=bar) for f in plan.files]
        # The revision's name last: until then it refers to the old copy in the cache.
        hf_hub_download(plan.name, "config.json", revision=plan.revision)
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:  # RuntimeError: Xet storage
        raise _hub_error(error, plan.name, plan.revision) from error
    directory = Path(paths[0]).parent
    if absent := missing_weights(directory):
        raise CheckpointError(
            f"{plan.name} lacks {absent[0]!r}, which its index names, on the hub too; give another revision."
        )
    return directory


def _plan_from_cache(name: str, revision: str, why: str, remedy: str) -> PullPlan:
    directory = cached(name, revision=revision)
    if directory is None:
        raise CheckpointError(
            f"{name} is not, or not wholly, in the local cache and {why}; copy the checkpoint here and give "
            f"its directory, or {remedy}."
        )
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.is_file()}
    nothing: frozenset[str] = frozenset()
    commit = directory.name
    return PullPlan(name=name, revision=revision, commit=commit, files=sizes, missing=nothing, note=why)


def missing_weights(directory: Path) -> list[str]:
    """The weight files that a snapshot lacks. `open_checkpoint` refuses a corrupt index."""
    index = directory / _INDEX
    if (directory / "model.safetensors").exists():
        return []
    if not index.exists():
        return ["model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({s for s in shards if isinstance(s, str) and not (directory / s).exists()})


def _is_cached(name: str, commit: str, file: RepoSibling) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, file.rfilename, revision=commit), str):
        return True
    # The file may be cached under another commit: the cache holds each content once.
    content = file.lfs.sha256 if file.lfs else file.blob_id
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    return content is not None and (blobs / content).exists()


def _suggestion(path: Path, *, otherwise: str = ".") -> str:
    """The end of a sentence about a path that does not exist: suggests a directory of a similar name."""
    try:
        siblings = [name for name in os.listdir(path.parent) if os.path.isdir(path.parent / name)]
    except (OSError, ValueError):
        siblings = []
    return suggestion(path.name, siblings, otherwise=otherwise)


def _bar(progress: Progress, total: int) -> Any:
    """A class for huggingface_hub to use as tqdm: all bars add to one count."""
    done = 0

    class Bar:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def update(self, num_bytes: float | None = 1) -> None:
            nonlocal done
            done += int(num_bytes or 0)
            progress(done, total)

        def _ignore(self, *_: object, **__: object) -> None:
            pass

        # Xet reports received and written bytes; only the written ones count.
        update_transfer = set_postfix_str = set_transfer_postfix_str = close = __exit__ = _ignore

    return Bar


def _hub_error(error: Exception, name: str, revision: str) -> CheckpointError:
    """The CheckpointError of a huggingface_hub error, with a remedy."""
    import httpx2
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "not in the cache" hides the error of the hub
    line = _first_line(error)
    match error:
        case errors.GatedRepoError():
            text = f"{name} is gated: accept its terms on {page}, then {_LOG_IN}."
        case errors.RevisionNotFoundError():
            text = f"{name} has no revision {revision!r}; give a branch, a tag or a whole commit of {page}."
        case errors.RepositoryNotFoundError():
            text = f"{name} is not on the hub, or private. Check the name on {page}; if private, {_LOG_IN}."
        case errors.HfHubHTTPError(response=response) if response.status_code in (401, 403):
            text = f"the hub refuses {name} ({response.status_code}): {_LOG_IN}, and have access on {page}."
        case errors.HfHubHTTPError(response=response):
            text = f"the hub answered {response.status_code} for {name}; try again later."
        case OSError(errno=errno.ENOSPC):
            text = (
                f"the disk is full while fetching {name}; free some space or set HF_HOME, and run it again."
            )
        case OSError(errno=errno.EROFS | errno.EACCES | errno.EPERM):
            text = (
                f"the cache of models, {constants.HF_HUB_CACHE}, cannot be written: {error.strerror}. "
                "Set HF_HOME to a directory that can."
            )
        case httpx2.RequestError():
            text = f"the connection broke while fetching {name}: {line}; run it again for the rest."
        case _:
            text = f"{name} cannot be fetched from {constants.ENDPOINT}: {type(error).__name__}: {line}"
    return CheckpointError(text)


def _unreachable(error: Exception) -> str:
    from huggingface_hub import constants

    return f"the hub at {constants.ENDPOINT} cannot be reached: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
