"""Replicas of the released model on devices by their data sheets, and of a measured model on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dgemma.bench.devices import DEVICES, Device, device_named
from dgemma.bench.predict import RELEASED, cache_memory, default_format
from dgemma.engine.kv_cache_manager import plan_capacity
from dgemma.errors import InputError
from dgemma.model.config import ModelConfig
from dgemma.plan.simulated_replica import ReplicaShape
from dgemma.plan.step_times import PredictedTimes, StepTimes

# Twice the engine's: half the work for a simulation, and prefixes are found to 64 tokens instead of 32.
BLOCK_SIZE = 64
_CACHE_SHARE = 0.9
_CAUSAL_SLOTS = (256, 128, 64, 32, 16, 8)  # a left-to-right server batches more answers: as many as fit
_COPIES = 3  # and it reads its blocks where they are, where a canvas reads a copy of its window


@dataclass(frozen=True)
class Hardware:
    """devices: in a machine. A replica has one of them."""

    device: Device
    devices: int

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """`h100`, or `h100x8` for machines of eight."""
        several = None if text.lower() in DEVICES else re.fullmatch(r"(.+)x(\d+)", text)
        if several is None:
            return cls(device_named(text), 1)
        if (count := int(several[2])) < 1:
            raise InputError(f"{text!r} has no device.", field="hardware")
        return cls(device_named(several[1]), count)


def predicted_shape(
    hardware: Hardware,
    weight_format: str | None,
    *,
    max_len: int,
    causal: bool = False,
    max_num_seqs: int = 16,
    config: ModelConfig = RELEASED,
    block_size: int = BLOCK_SIZE,
) -> ReplicaShape:
    """By the cost model. causal: a left-to-right model of the same size."""
    device = hardware.device
    form = weight_format or default_format(config, device)
    memory = cache_memory(config, device, form)
    if memory <= 0:
        raise InputError(f"the weights as {form} do not fit into one {device.label}.", field="hardware")
    times = PredictedTimes(config, device, form, causal=causal)
    slots = _CAUSAL_SLOTS if causal else (max_num_seqs,)
    for count in slots:
        try:
            return shape_of(
                times,
                config,
                cache_bytes=int(_CACHE_SHARE * memory * (_COPIES if causal else 1)),
                max_len=max_len,
                max_num_seqs=count,
                causal=causal,
                block_size=block_size,
            )
        except InputError:
            if count == slots[-1]:
                raise
    raise AssertionError


def shape_of(
    times: StepTimes,
    config: ModelConfig,
    *,
    cache_bytes: int,
    max_len: int,
    max_num_seqs: int,
    causal: bool = False,
    item_bytes: int = 2,
    block_size: int = BLOCK_SIZE,
) -> ReplicaShape:
    return ReplicaShape(
        times=times,
        capacity=plan_capacity(
            config,
            num_bytes=cache_bytes,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            item_bytes=item_bytes,
            max_len=min(max_len, config.max_positions),
        ),
        block_size=block_size,
        window=config.window,
        canvas_len=None if causal else config.canvas_len,
        max_num_seqs=max_num_seqs,
    )
