"""A server process whose engine hangs in its first step: `python -m server.toy_server`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from dgemma.engine.async_engine import AsyncEngine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.server.http.settings import Settings
from dgemma.server.run import exit_without_threads, serve
from engine_life import CONFIG, ENCODE_BLOCK, make_engine
from engine_life import serve as serve_engine
from server.fake_engine import FakeText


def toy_engine(step_timeout_s: float, *, hangs: bool = False, **options: Any) -> AsyncEngine:
    """An engine on the toy transformer; with `hangs`, its first step never ends."""

    def new(hangs: bool = False) -> Any:
        memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=120, window_blocks=40)
        limits = SchedulerConfig(max_num_seqs=2, chunk_size=64, encode_block=ENCODE_BLOCK)

        def fault(point: str, request_ids: Sequence[int]) -> None:
            if hangs and point == "forward":
                threading.Event().wait()

        return make_engine(memory, limits, fault=fault)

    return serve_engine(new(hangs), max_waiting=8, make_engine=new, step_timeout_s=step_timeout_s, **options)


if __name__ == "__main__":
    serve(Settings(port=0, drain_timeout_s=1), toy_engine(600, hangs=True), FakeText())
    exit_without_threads(0)
