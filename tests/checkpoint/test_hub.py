"""Hub names: against a real server on loopback, through huggingface_hub itself."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import dgemma
from dgemma.checkpoint import hub
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError, InputError
from fake_hub import NAME, NOT_READ, SHARDED, SHARDS, FakeHub, environment, running_hub, use_hub

CLOSED_PORT = "http://127.0.0.1:9"  # "discard": nothing listens there


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    with running_hub() as fake:
        fake.repos[NAME] = {**SHARDED, **NOT_READ}
        use_hub(monkeypatch, fake.address, tmp_path / "home")
        yield fake


def refused(name: str | Path, **options: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        hub.resolve(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_dgemma_reads_is_fetched_whole_and_nothing_else(server: FakeHub) -> None:
    seen: list[tuple[int, int]] = []
    path = hub.resolve(NAME, progress=lambda done, total: seen.append((done, total)))
    assert {f.name: f.read_bytes() for f in path.iterdir()} == SHARDED
    total = sum(map(len, SHARDED.values()))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sorted(server.fetched()) == sorted(SHARDED)
    assert tuple(server.fetched()[-2:]) == SHARDS, "weights last"
    assert not any(file in path for _, path, _ in server.requests for file in NOT_READ)


def test_a_whole_copy_is_used_without_asking(server: FakeHub) -> None:
    first = hub.resolve(NAME)
    server.requests.clear()
    assert hub.resolve(NAME) == first
    assert hub.resolve(NAME, revision=server.commit(NAME)) == first
    assert server.requests == []
    assert hub.pull(NAME) == first, "pull asks, but fetches nothing"
    assert server.requests
    assert server.fetched() == []


def test_a_real_checkpoint_opens(server: FakeHub) -> None:
    golden = Path(dgemma.__file__).parent / "data" / "golden" / "checkpoint"
    server.repos["someone/golden"] = {f.name: f.read_bytes() for f in golden.iterdir()}
    assert open_checkpoint(hub.resolve("someone/golden")).config == open_checkpoint(golden).config


def test_a_broken_connection_is_resumed_where_it_broke(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    server.breaks[SHARDS[0]] = [40_000]
    seen: list[int] = []
    path = hub.resolve(NAME, progress=lambda done, total: seen.append(done))
    assert (path / SHARDS[0]).read_bytes() == SHARDED[SHARDS[0]]
    assert server.ranges(SHARDS[0]) == [None, "bytes=40000-"]
    assert seen[-1] == sum(map(len, SHARDED.values())), "no byte is counted twice"


def test_a_connection_that_breaks_for_good_keeps_the_whole_files(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda s: None))
    server.breaks[SHARDS[1]] = [0] * 6
    error = refused(NAME)
    assert error.startswith(f"the connection broke while fetching {NAME}: ")
    assert error.endswith("; run it again for the rest.")
    server.requests.clear()
    assert (hub.resolve(NAME) / SHARDS[1]).read_bytes() == SHARDED[SHARDS[1]]
    assert server.fetched() == [SHARDS[1]]


def test_a_hub_that_fails_between_two_files_says_so(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hub.plan_pull(NAME)
    server.refuse = (503, "")
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda s: None, time=lambda: 0)
    )
    with pytest.raises(CheckpointError, match=f"the hub answered 503 for {NAME}; try again later."):
        hub.fetch(plan)


@pytest.mark.parametrize("what", ["link", "content"])
def test_a_partial_copy_is_fetched_again(server: FakeHub, what: str) -> None:
    path = hub.resolve(NAME)
    shard = path / SHARDS[0]
    (shard if what == "link" else shard.resolve()).unlink()
    assert hub.cached(NAME) is None
    server.requests.clear()
    assert hub.resolve(NAME) == path
    assert shard.read_bytes() == SHARDED[SHARDS[0]]
    assert server.fetched() == ([] if what == "link" else [SHARDS[0]])


def test_a_partial_copy_without_a_hub_is_refused(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.resolve(NAME) / SHARDS[1]).unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "is not, or not wholly, in the local cache" in refused(NAME)


@pytest.mark.parametrize("index", [b'{"weight_map": {"a": 3, "b": ["x"]}}', b'{"weight_map": 1}', b"{}"])
def test_a_corrupt_index_is_left_to_the_reader(server: FakeHub, index: bytes) -> None:
    server.repos[NAME]["model.safetensors.index.json"] = index
    assert hub.resolve(NAME).is_dir()
    server.repos[NAME]["model.safetensors.index.json"] = b"{"
    with pytest.raises(CheckpointError, match=r"index.json is not valid JSON; it is truncated or corrupt"):
        hub.pull(NAME)


def test_an_index_that_names_what_the_hub_lacks(server: FakeHub) -> None:
    del server.repos[NAME][SHARDS[1]]
    assert refused(NAME) == (
        f"{NAME} lacks {SHARDS[1]!r}, which its index names, on the hub too; give another revision."
    )


def test_a_new_commit_fetches_only_what_changed_and_the_old_copy_stays(server: FakeHub) -> None:
    old, old_commit = hub.resolve(NAME), server.commit(NAME)
    server.repos[NAME]["README.md"] = b"# tiny, again"
    assert hub.plan_pull(NAME).missing == {"README.md"}
    assert hub.resolve(NAME) == old
    server.requests.clear()
    new = hub.pull(NAME)
    assert server.fetched() == ["README.md"]
    assert new != old
    assert hub.resolve(NAME) == new
    assert hub.resolve(NAME, revision=old_commit) == old


def test_a_commit_during_the_download_does_not_mix_two_snapshots(server: FakeHub) -> None:
    plan = hub.plan_pull(NAME)
    last = plan.total_bytes

    def push(done: int, total: int) -> None:
        if done == last:
            server.renamed[server.commit(NAME)] = "f" * 40

    path = hub.fetch(plan, push)
    assert path.name == plan.commit
    assert {f.name for f in path.iterdir()} == set(SHARDED)
    assert hub.cached(NAME) is None, "main is the new commit, of which only config.json is here"
    assert hub.resolve(NAME).name == "f" * 40


def test_an_interrupted_update_leaves_the_old_copy_in_use(server: FakeHub) -> None:
    old = hub.resolve(NAME)
    server.repos[NAME][SHARDS[0]] = b"other" * 9

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(NAME, progress=interrupt)
    assert hub.resolve(NAME) == old


def test_offline_uses_the_cache_and_says_what_is_missing(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hub.resolve(NAME)
    server.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.resolve(NAME) == hub.pull(NAME) == path
    assert hub.plan_pull(NAME).note == "HF_HUB_OFFLINE is set"
    assert refused("someone/else") == (
        "someone/else is not, or not wholly, in the local cache and HF_HUB_OFFLINE is set; copy the "
        "checkpoint here and give its directory, or unset it."
    )
    assert server.requests == []


def test_a_hub_that_cannot_be_reached(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hub.resolve(NAME)
    use_hub(monkeypatch, CLOSED_PORT, tmp_path / "home")
    assert hub.resolve(NAME) == hub.pull(NAME) == path
    error = refused("someone/else")
    assert error.startswith("someone/else is not, or not wholly, in the local cache and the hub at ")
    assert f"{CLOSED_PORT} cannot be reached: " in error
    assert error.endswith(
        "; copy the checkpoint here and give its directory, or set HF_ENDPOINT to a hub that can be reached."
    )
    for nonsense in ("nonsense", "http://[nonsense"):
        use_hub(monkeypatch, nonsense, tmp_path / "home")
        assert f"the hub at {nonsense} cannot be reached: " in refused("someone/else")


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ((404, "RepoNotFound"), ["is not on the hub, or private", "Check the name on", "hf auth login"]),
        ((401, "RepoNotFound"), ["is not on the hub, or private", "HF_TOKEN"]),
        ((403, "GatedRepo"), ["is gated: accept its terms on", f"/{NAME}", "hf auth login"]),
        ((401, "GatedRepo"), ["is gated: accept its terms on"]),
        ((401, ""), ["the hub refuses", "(401)", "hf auth login", "HF_TOKEN"]),
        ((403, ""), ["the hub refuses", "(403)"]),
        ((500, ""), ["the hub answered 500", "try again later"]),
    ],
)
def test_a_refusal_says_what_to_do(server: FakeHub, refuse: tuple[int, str], words: list[str]) -> None:
    server.refuse = refuse
    error = refused(NAME)
    assert NAME in error
    assert all(word in error for word in words), error


def test_an_unknown_name_and_an_unknown_revision(server: FakeHub) -> None:
    assert "someone/tinny is not on the hub" in refused("someone/tinny")
    assert refused(NAME, revision="v9") == (
        f"{NAME} has no revision 'v9'; give a branch, a tag or a whole commit of {server.address}/{NAME}."
    )


@pytest.mark.parametrize("answer", [b"<html>log in to the hotel</html>", b"[]", b"{}"])
def test_something_that_is_not_a_hub(server: FakeHub, answer: bytes) -> None:
    server.raw_answer = answer
    assert refused(NAME).startswith(f"{NAME} cannot be fetched from {server.address}: ")


@pytest.mark.parametrize(
    ("lacking", "named"), [(SHARDS, "safetensors file"), (["config.json"], "config.json")]
)
def test_a_repository_that_holds_no_checkpoint(server: FakeHub, lacking: list[str], named: str) -> None:
    for file in lacking:
        del server.repos[NAME][file]
    assert refused(NAME) == (f"{NAME} has no {named}; dgemma reads safetensors, never pickles.")
    assert server.fetched() == []


def test_too_little_room_is_refused_before_the_first_byte(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=10))
    assert refused(NAME) == (
        f"{NAME} needs 220.1 kB, {tmp_path} has 10 B free. "
        "Free some space, or set HF_HOME to a directory on a larger disk."
    )
    assert server.fetched() == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            f"the disk is full while fetching {NAME}; free some space",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "hub, cannot be written: Permission denied. Set HF_HOME",
        ),
        (
            OSError(errno.EROFS, "Read-only file system"),
            "hub, cannot be written: Read-only file system. Set HF_HOME",
        ),
        (RuntimeError("xet: no answer\nmore"), f"{NAME} cannot be fetched from"),
    ],
)
def test_a_disk_or_store_that_fails_midway(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    assert message in refused(NAME)


def test_what_exists_wins_and_what_looks_like_a_path_is_one(server: FakeHub, tmp_path: Path) -> None:
    local = tmp_path / "someone" / "tiny"
    local.mkdir(parents=True)
    (local / "config.json").touch()
    assert hub.resolve(NAME) == Path(NAME)
    assert hub.resolve(local) == local
    assert hub.resolve(str(local / "config.json")) == local / "config.json"
    with pytest.raises(InputError, match="only a hub name has revisions"):
        hub.resolve(local, revision="v1")
    missing: list[str | Path] = [
        "./tiny",
        "/someone/tiny",
        "~/no/tiny",
        "~nobody-here/tiny",
        "some\\tiny",
        "a/b/c",
        Path("a/b"),
        "a/b\0/c",
        local / "config.json" / "x",  # its parent cannot be listed for a guess
    ]
    for path in missing:
        assert "does not exist" in refused(path)
    assert refused(tmp_path / "someone" / "tinny") == (
        f"{tmp_path}/someone/tinny does not exist; did you mean 'tiny'? Give the directory of a checkpoint."
    )
    assert server.requests == []


def test_a_mistyped_directory_gets_a_guess(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert refused("my-modl") == (
        "'my-modl' is neither a directory here nor a hub name such as google/diffusiongemma-26B-A4B-it; "
        "did you mean 'my-model'?"
    )
    assert refused("").startswith("'' is neither")
    assert refused("x" * 300).startswith("'xxx")
    assert server.requests == []
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    error = refused("models/tinny")
    assert error.startswith("models/tinny is not on the hub")
    assert error.endswith(" Nor is models/tinny a directory here; did you mean 'tiny'?")


def test_pull_takes_hub_names_only(server: FakeHub) -> None:
    odd = (
        "tiny",
        "./tiny",
        "a/b/c",
        "someone/",
        "a b/c",
        "a--b/c",
        "a/b..c",
        "a/b.git",
        "-a/b",
        "a/b.",
        "é/b",
    )
    for name in (*odd, f"a/{'b' * 97}"):
        with pytest.raises(CheckpointError, match="is not a hub name; give owner/name, for example google/"):
            hub.pull(name)
        assert "is neither a directory" in refused(name) or "does not exist" in refused(name)
    for name in ("a/b", "0a-b.c_d/E.f-g", f"a/{'b' * 96}", hub.EXAMPLE_NAME):
        assert hub.cached(name) is None
    assert server.requests == []


def test_progress_counts_what_xet_writes_and_not_what_it_receives() -> None:
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    seen: list[tuple[int, int]] = []
    bar = hub._bar(lambda done, total: seen.append((done, total)), 100)
    with XetDownloadProgressReporter(reconstruction_desc="x", log_level=30, tqdm_class=bar) as reporter:
        for received, written in ((50, 0), (90, 60), (90, 100)):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=100,
                    total_bytes_completed=written,
                    total_transfer_bytes_completed=received,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completion_rate=None,
                )
            )
    assert seen == [(60, 100), (100, 100)]


def test_the_environment_is_honoured_and_torch_is_not_needed(server: FakeHub, tmp_path: Path) -> None:
    code = (
        "import sys; from dgemma.checkpoint import hub\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        f"print(hub.resolve({NAME!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    home = tmp_path / "another home"

    def path_of(**more: str) -> str:
        env = environment(server.address, home, **more)
        run = [sys.executable, "-W", "error", "-c", code]
        return subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout.strip()

    path = path_of()
    assert Path(path).is_relative_to(home)
    server.refuse = (500, "")
    assert path_of(HF_HUB_OFFLINE="1") == path
    shutil.rmtree(home)


def test_published_quantized_forms_are_those_that_dgemma_reads(server: FakeHub) -> None:
    data = Path(__file__).parent.parent / "data"
    read = next(path.parent for path in data.rglob("modelopt-nvfp4/config.json"))
    server.repos["some/nvfp4"] = {file.name: file.read_bytes() for file in read.iterdir() if file.is_file()}
    config = json.loads(server.repos["some/nvfp4"]["config.json"])
    server.repos["some/plain"] = {**SHARDED, "config.json": json.dumps(drop(config)).encode()}
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    server.repos["some/other"] = {**SHARDED, "config.json": json.dumps(config).encode()}
    server.repos["some/gguf"] = {"model.gguf": b"GGUF"}
    server.repos["some/broken"] = {"config.json": b"{"}
    others = ["some/other", "some/gguf", "some/broken", "some/gone"]
    server.quantized[NAME] = [*others, "some/nvfp4", "some/plain"]
    found = hub.published_quantized(NAME)
    assert [plan.name for plan in found] == ["some/nvfp4"]
    assert found[0].total_bytes > 0
    assert hub.published_quantized(NAME, float8=False) == []  # NVFP4 has scales in 8 bits
    assert hub.published_quantized("some/nvfp4") == []


def drop(config: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def test_where_the_hub_cannot_be_asked_nothing_is_published(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.published_quantized(NAME) == []


def test_of_a_checkpoint_that_is_only_looked_at_the_configuration_is_fetched(server: FakeHub) -> None:
    directory = hub.resolve_config(NAME)
    assert (directory / "config.json").read_bytes() == SHARDED["config.json"]
    assert server.fetched() == ["config.json"]
    with pytest.raises(CheckpointError, match="someone/gone is not on the hub"):
        hub.resolve_config("someone/gone")
    assert hub.resolve_config("bundled:text") == hub.resolve("bundled:text")


def test_a_config_from_a_hub_that_cannot_be_reached_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_hub(monkeypatch, CLOSED_PORT, tmp_path / "home")
    with pytest.raises(CheckpointError) as caught:
        hub.resolve_config(NAME)
    text = str(caught.value)
    assert text.startswith(f"{NAME} is neither a directory here nor in the local cache, and the hub at ")
    assert text.endswith("; check the network, or set HF_ENDPOINT to a hub that can be reached.")
    assert caplog.text == ""  # the library would tell of five more tries
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="and HF_HUB_OFFLINE is set; copy the checkpoint here"):
        hub.resolve_config(NAME)


@pytest.mark.parametrize("name", ["nowhere.gguf", "some/nowhere.gguf", "config.json"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(name: str, tmp_path: Path) -> None:
    for find in (hub.resolve, hub.resolve_config):
        with pytest.raises(CheckpointError, match=r"does not exist.* Give the path of the file\."):
            find(name)
    assert not hub.is_on_hub(name)
