"""The state that all endpoints of one server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from dgemma.engine.service import EngineService, ServedModel
from dgemma.server.compile_pool import CompilePool
from dgemma.server.defaults import RequestDefaults, read_defaults
from dgemma.server.http.admission import Admission
from dgemma.server.http.api_key import ApiKey
from dgemma.server.http.metrics import Metrics
from dgemma.server.http.rate_limits import RateLimits
from dgemma.server.http.settings import Settings
from dgemma.server.images import ImageLoader
from dgemma.server.responses.store import ResponseStore
from dgemma.server.serving import ServingContext
from dgemma.server.text import TextService
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.tasks.calibration import Calibration


@dataclass(kw_only=True)
class ServerState:
    settings: Settings
    engine: EngineService
    text: TextService
    metrics: Metrics = field(default_factory=Metrics)
    began_at: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    admission: Admission = field(init=False)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    compiler: GrammarCompiler = field(init=False)
    compile_pool: CompilePool = field(init=False)
    images: ImageLoader = field(init=False)
    calibration: Calibration | None = field(init=False)
    defaults: RequestDefaults = field(init=False)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.admission = Admission(settings.max_concurrent_requests, settings.max_buffered_bytes)
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
        self.compiler = self.text.compiler(self.engine.model)
        self.compile_pool = CompilePool(self.compiler)
        self.images = ImageLoader(settings, self.engine.model.image_settings)
        file = self.settings.calibration
        self.calibration = None if file is None else Calibration.load(file)
        self.defaults = read_defaults(settings.defaults)
        self.defaults.params(self.engine.model.defaults)  # refuses what does not go with the checkpoint's
        self.defaults.check_thinking(self.text)

    @property
    def serving_context(self) -> ServingContext:
        return ServingContext(
            settings=self.settings,
            served=self.served,
            checkpoint_defaults=self.engine.model.defaults,
            thinking=self.defaults.thinking,
            text=self.text,
            compiler=self.compiler,
            calibration=self.calibration,
        )

    def context_of(self, key: ApiKey) -> ServingContext:
        """The same for a client of this key."""
        return replace(self.serving_context, responses=self.responses.of(key))

    @property
    def served(self) -> ServedModel:
        """The engine's model, with this server's defaults."""
        model = self.engine.model
        return replace(model, defaults=self.defaults.params(model.defaults))

    @property
    def num_active(self) -> int:
        """Requests being answered."""
        return self.admission.num_active

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good."""
        return self.engine.stats().failure

    async def drain(self) -> bool:
        """Admit no more requests, and finish the admitted ones -> whether all finished in time.

        Admission closes before the engine does: an admitted request may not have reached the engine yet.
        """
        began = time.monotonic()
        timeout_s = self.settings.drain_timeout_s
        all_finished = await self.admission.drain(timeout_s)
        await self.engine.drain(max(0.0, timeout_s - (time.monotonic() - began)))
        return all_finished
