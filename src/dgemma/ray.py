"""Replicas on Ray Serve: `dgemma serve MODEL --replicas N`, and `dgemma.ray:app` for a cluster.

An engine is a deployment of its own. The server, which reads requests and renders chats, is the same
application as in one process; its engine is a `ReplicatedEngine` over the deployment's handle.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from dgemma.checkpoint.hub import resolve
from dgemma.engine.prefix_cache import BLOCK_SIZE, BlockHashChain
from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineEvent, EngineStats, ServedModel
from dgemma.errors import DgemmaError, InputError
from dgemma.machine import choose_threads
from dgemma.scale.autoscaling import Autoscaler, AutoscalingRule
from dgemma.scale.prefix_routes import PrefixRoutes
from dgemma.scale.replicated_engine import ReplicaLostError, ReplicatedEngine
from dgemma.server.http.settings import Adapter, LoadOptions, Settings

NAME = "dgemma"
_OBJECT_STORE_BYTES = 100 << 20  # requests and events are small
_DOWN_AFTER_S = 300.0
_STARTS = 3
_STARTS_WITHIN_S = 120  # of each of Ray's processes


class Replica:
    """A deployment: one engine with the whole model. All calls run in its event loop.

    version: for Ray Serve, which replaces replicas whose arguments have changed.
    """

    def __init__(self, model: str, options: LoadOptions, settings: Settings, version: int = 0) -> None:
        import torch

        from dgemma.loading import load
        from dgemma.service import open_engine_of

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        lm = load(
            model,
            dtype=options.dtype,
            device=options.device,
            exact=options.exact,
            compile=options.compile,
        )
        self._engine = open_engine_of(lm, options, settings, queue_len=settings.queue_len)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent | DgemmaError, None]:
        try:
            async with aclosing(self._engine.submit(request)) as events:
                async for event in events:
                    yield event
        except DgemmaError as error:
            yield error  # as a value: what is raised comes back in a wrapper of Ray's

    async def served(self) -> ServedModel:
        return self._engine.model

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica whose engine has stopped or hangs."""
        stats = self._engine.stats()
        if stats.failure is not None or stats.is_stalled:
            raise RuntimeError(stats.failure or "a step of the engine hangs")


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc, unused-ignore]
    """Prefers the replica that has the longest prefix of the prompt, else the less loaded of two."""

    def initialize_state(self, **_: Any) -> None:
        self._routes: PrefixRoutes[ReplicaID] = PrefixRoutes()
        self._running: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        loads = {each: self._load(each) for each in by_id}
        first = self._routes.choose(_hashes(pending_request), loads, list(by_id))
        return [[by_id.pop(first)], list(by_id.values())]  # the others if it takes no more

    def _load(self, replica: ReplicaID) -> int:
        """Of this router, and of others as far as they were heard of."""
        return max(self._running.get(replica, 0), self.replica_queue_len_cache.get(replica) or 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._running[replica_id] = self._running.get(replica_id, 0) + 1
        self._routes.sent(_hashes(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id] = max(0, self._running.get(replica_id, 0) - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._running.pop(replica_id, None)


def _hashes(pending: PendingRequest | None) -> Sequence[bytes]:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, EngineRequest):
        return ()
    chain = BlockHashChain(BLOCK_SIZE, request.cache_root, request.images)
    chain.add(request.prompt)
    return chain.hashes


class RayReplicas:
    """The replicas of a deployment, by its handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        events: Any = None
        is_over = False
        try:
            events = self._streams.submit.remote(request)
            async for event in events:
                if isinstance(event, DgemmaError):
                    is_over = True
                    raise event
                yield event
            is_over = True
        except RayError as error:
            is_over = isinstance(error, RayActorError)
            raise ReplicaLostError(f"the replica is gone: {type(error).__name__}.") from error
        finally:
            if events is not None and not is_over:
                events.cancel()

    async def stats(self) -> Sequence[EngineStats]:
        try:
            found: list[EngineStats] = await self._handle.broadcast("stats").results_async(timeout_s=5)
        except (RayError, TimeoutError):  # one is being replaced
            return []
        return found


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """For Ray Serve, which calls it every ten seconds: the planner's rule."""
    state = context.policy_state
    rule = AutoscalingRule(
        min_replicas=context.capacity_adjusted_min_replicas,
        max_replicas=context.capacity_adjusted_max_replicas,
        down_after_s=_DOWN_AFTER_S,
    )
    scaler = Autoscaler(rule, less_since=state.get("less_since"))
    wanted = scaler.wanted(
        replicas=context.target_num_replicas,
        slots_each=round(context.config.target_ongoing_requests),
        requests=math.ceil(context.total_num_requests),
        now=context.current_time or 0.0,
    )
    return wanted, {"less_since": scaler.less_since}


def deployment(
    model: str, options: LoadOptions, settings: Settings, *, on_this_machine: bool, version: int = 0
) -> Any:
    """The engines of an application. on_this_machine: they share its processor and its memory.

    version: another one replaces all replicas, one after another, as other arguments would.
    """
    threads, most = options.threads, settings.most_replicas
    if on_this_machine:
        threads = threads or max(1, choose_threads() // most)
        settings = replace(settings, memory_fraction=settings.memory_fraction / most)
    resources: dict[str, float] = {"num_cpus": 0 if on_this_machine else threads or 1}
    if options.device.startswith(("cuda", "gpu")):
        resources["num_gpus"] = 1
    scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    if most > settings.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=most,
                target_ongoing_requests=settings.max_num_seqs,
                upscale_delay_s=0,
                downscale_delay_s=0,  # the rule waits itself
                policy=AutoscalingPolicy(policy_function="dgemma.ray:wanted_replicas"),
            )
        }
    if settings.routing == "prefix":
        scaling["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    made: Any = serve.deployment(
        name="Replica",
        # The engine's own queue refuses more, with the error of one process.
        max_ongoing_requests=2 * (settings.max_num_seqs + settings.queue_len),
        ray_actor_options=resources,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        **scaling,
    )(Replica)
    return made.bind(model, replace(options, threads=threads), settings, version)


def _start_ray() -> None:
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level="ERROR",
                log_to_driver=False,
            )
        except Exception:  # on a busy machine its parts do not wait long enough for each other
            ray.shutdown()
            if attempt == _STARTS:
                raise
        else:
            return


class LocalReplicas:
    """A Ray of this machine, with `settings.replicas` engines. It ends with the block."""

    def __init__(self, model: str, options: LoadOptions, settings: Settings) -> None:
        self._asked = model, options, settings
        self._version = 0
        self._lock = threading.Lock()

    def __enter__(self) -> ReplicatedEngine:
        # Ray's processes listen on all interfaces. A Ray of this machine asks for this secret (from 2.59 on).
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ.setdefault("RAY_raylet_start_wait_time_s", str(_STARTS_WITHIN_S))
        try:
            _start_ray()
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            handle = self._run()
            served: ServedModel = handle.served.remote().result()
            stats: Sequence[EngineStats] = handle.broadcast("stats").results(timeout_s=60)
        except Exception as error:  # Ray's own are of many kinds
            ray.shutdown()
            raise DgemmaError(
                f"Ray did not start {self._asked[2].replicas} replicas"
                f" (/tmp/ray/session_latest/logs): {error}"
            ) from error
        return ReplicatedEngine(served, RayReplicas(handle), stats)

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def replace_all(self) -> None:
        """One after another, each with the files that are there now. Running requests are finished."""
        with self._lock:
            self._version += 1
            self._run()

    def _run(self) -> DeploymentHandle[Any]:
        model, options, settings = self._asked
        bound = deployment(model, options, settings, on_this_machine=True, version=self._version)
        return serve.run(bound, name=NAME, route_prefix=None)


# In a cluster


class _Served:
    """The application of this process's `Server`: made in its constructor, after Ray has copied the class."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await _SERVED["app"](scope, receive, send)


_SERVED: dict[str, Any] = {}


class Server:
    """A deployment: the application of `dgemma serve` over the replicas."""

    async def __init__(self, handle: DeploymentHandle[Any], model: str, settings: Settings) -> None:  # type: ignore[misc]
        from dgemma.server.app import create_app
        from dgemma.server.text import CheckpointText

        served = await handle.served.remote()
        stats = await handle.broadcast("stats").results_async(timeout_s=60)
        engine = ReplicatedEngine(served, RayReplicas(handle), stats)
        _SERVED["app"] = create_app(settings, engine, CheckpointText.of_files(resolve(model), served))


def app(args: Mapping[str, Any]) -> Any:
    """A Serve application. args: `model`, and the fields of `Settings` and `LoadOptions`."""
    values = dict(args)
    model = values.pop("model", None)
    if not isinstance(model, str):
        raise InputError.about("model", f"is {model!r}; args of dgemma.ray:app must name a checkpoint.")
    if "adapters" in values:
        values["adapters"] = tuple(map(Adapter.parse, values["adapters"]))
    values.setdefault("served_model_name", model.rstrip("/").rpartition("/")[2])
    names = {kind: {entry.name for entry in fields(kind)} for kind in (Settings, LoadOptions)}
    unknown = values.keys() - names[Settings] - names[LoadOptions]
    if unknown:
        raise InputError.about(sorted(unknown)[0], "is no option of dgemma serve.")
    settings = Settings(**{name: values[name] for name in names[Settings] & values.keys()})
    options = LoadOptions(**{name: values[name] for name in names[LoadOptions] & values.keys()})
    ingress: Any = serve.deployment(
        name="Server",
        max_ongoing_requests=settings.max_concurrent_requests,
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress(_Served())(Server))
    return ingress.bind(deployment(model, options, settings, on_this_machine=False), model, settings)
