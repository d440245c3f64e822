"""Real processes of one torch.distributed group: a test file runs itself as each of them.

Under pytest's importlib mode a function of a test file cannot be found by a spawned child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Without it gloo asks what the machine's name means, which not every container knows.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "PYTHONPATH": str(Path(__file__).parent),
}


def run_processes(file: str, size: int, directory: Path, *arguments: object) -> list[Any]:
    """What each rank's `run` returned. directory: an empty one, where they meet."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", file]
            + [str(each) for each in (rank, size, directory / "store", *arguments)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:  # one that waits for a dead one would wait for half an hour
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(said) for said, _ in ended]


def run_rank(run: Callable[..., Any]) -> None:
    """As a process: `run(mesh, *arguments)`, and print what it returns."""
    rank, size, store, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size)
    )
    mesh: DeviceMesh = init_device_mesh("cpu", (int(size),))
    found = run(mesh, *arguments)
    distributed.destroy_process_group()
    print(json.dumps(found))
