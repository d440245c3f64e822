"""The state of a run on several processes, by torch.distributed.checkpoint: a file of safetensors per rank.

Any number of processes can read what any other number wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dgemma.durable_files import sha256_of
from dgemma.model.ranks import Ranks


def write_sharded(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write the own rows of all tensors -> the SHA-256 of every rank's file, by name. All ranks call it."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    save(dict(tensors), storage_writer=writer, process_group=ranks.messages)
    own = [file for file in directory.iterdir() if file.name.startswith(f"shard-{ranks.rank + 1:05d}-")]
    found = ranks.exchange({file.name: sha256_of(file) for file in own})
    return {name: sha256 for files in found for name, sha256 in files.items()}


def read_sharded(directory: Path, masters: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of a state, divided as the master weights are. All ranks call it."""
    reader = HuggingFaceStorageReader(str(directory))
    tensors = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        master = masters.get(name.partition(".")[2])
        if master is not None and stored.size == master.shape:
            tensors[name] = torch.zeros_like(master)  # also of moments
        else:
            tensors[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: as intended
        load(tensors, storage_reader=reader, process_group=ranks.messages, no_dist=ranks.messages is None)
    return tensors
