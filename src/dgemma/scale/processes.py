"""The processes of `--tensor-parallel N` and `--nproc N`: started, joined, and ended together.

The command starts copies of itself, with the variables that torchrun sets; `torchrun` may start all of them.
Rank 0 speaks to the user. The others load their part of the model, and take part in its steps until it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dgemma.checkpoint.device import check_device
from dgemma.errors import InputError, RankError
from dgemma.machine import choose_threads

# The others are not at the same place so long after one has begun to wait: they are gone, or hang.
TIMEOUT = timedelta(seconds=120)
_END_WITHIN_S = 5.0
_STORE = "DGEMMA_RANK_STORE"


@contextmanager
def joined(size: int, device: str, arguments: list[str], *, option: str) -> Iterator[DeviceMesh]:
    """The mesh of `size` ranks. arguments: of the command, for the ranks that are started here.

    option: that gave the size.
    """
    kind = check_device(device).type
    if kind not in ("cpu", "cuda"):
        raise InputError.about(
            option, f"is {size}; device {kind!r} runs one process only. Give 1, or choose device cpu."
        )
    with ExitStack() as stack:
        if "WORLD_SIZE" not in os.environ:
            if kind == "cuda" and size > (num_gpus := torch.cuda.device_count()):
                raise InputError.about(
                    option, f"is {size}; this machine has {num_gpus} GPUs. Give at most as many."
                )
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dgemma-"))) / "ranks"
            stack.callback(_restore, dict(os.environ))
            os.environ.update(_environment(0, size, store))
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            stack.enter_context(_started(size, store, arguments))
        elif (started := os.environ["WORLD_SIZE"]) != str(size):
            raise InputError.about(
                option, f"is {size}, but {started} processes were started. Give the same number."
            )
        else:
            _check_started(kind)
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        rank = int(os.environ["RANK"])
        try:
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                init_method=f"file://{os.environ[_STORE]}" if _STORE in os.environ else None,
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )
        except RuntimeError as error:
            raise RankError(f"rank {rank} of {size} cannot join: {error}") from error
        stack.callback(distributed.destroy_process_group)
        yield init_device_mesh(kind, (size,))


@contextmanager
def _started(size: int, store: Path, arguments: list[str]) -> Iterator[None]:
    """Copies of this command as the other ranks. They end with this block, or when this process does."""
    code = "import sys; from dgemma.cli.main import main; sys.exit(main())"
    others: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            try:
                other = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-c", code, *arguments],
                    env=os.environ | _environment(rank, size, store),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            except OSError as error:
                raise RankError(f"rank {rank} of {size} cannot be started: {error.strerror}.") from None
            others.append(other)
        yield
    finally:
        for other in others:
            other.terminate()
        for other in others:
            try:
                other.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def _environment(rank: int, size: int, store: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        _STORE: str(store),
        # The same number everywhere: a product's bits depend on it, and ranks must not differ.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, choose_threads() // size))),
        # All are on this machine. Otherwise gloo asks what the machine's name means, and listens there.
        "GLOO_SOCKET_IFNAME": os.environ.get(
            "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
        ),
    }


def _restore(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _check_started(kind: str) -> None:
    """Raise `InputError` if what started this process did not say what a rank needs to know."""
    needed = ["RANK"]
    if kind == "cuda":
        needed.append("LOCAL_RANK")
    if _STORE not in os.environ:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if name not in os.environ:
            raise InputError(
                f"WORLD_SIZE is set, but {name} is not. "
                "Let torchrun start the processes, or unset WORLD_SIZE."
            )
