"""What the endpoints of one server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dgemma.canvas.calibration import Calibration
from dgemma.constraint.compiler import Compiler
from dgemma.engine.service import EngineService
from dgemma.server.admission import Admission
from dgemma.server.constraints import Constraints
from dgemma.server.metrics import Metrics
from dgemma.server.plan import Planner
from dgemma.server.settings import Settings
from dgemma.server.text import TextService


@dataclass(kw_only=True)
class ServerState:
    settings: Settings
    engine: EngineService
    text: TextService
    metrics: Metrics = field(default_factory=Metrics)
    began_at: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    admission: Admission = field(init=False)
    compiler: Compiler = field(init=False)
    constraints: Constraints = field(init=False)
    calibration: Calibration | None = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.settings.max_concurrent_requests)
        self.compiler = self.text.compiler(self.engine.model)
        self.constraints = Constraints(self.compiler)
        file = self.settings.calibration
        self.calibration = None if file is None else Calibration.load(file)

    @property
    def planner(self) -> Planner:
        return Planner(
            settings=self.settings,
            served=self.engine.model,
            text=self.text,
            compiler=self.compiler,
            calibration=self.calibration,
        )

    async def drain(self) -> bool:
        """Take nothing new, let all that came in be answered -> whether all was, in time.

        The door closes before the engine does: who is inside may not have reached the engine yet.
        """
        began = time.monotonic()
        timeout_s = self.settings.drain_timeout_s
        all_left = await self.admission.drain(timeout_s)
        await self.engine.drain(max(0.0, timeout_s - (time.monotonic() - began)))
        return all_left
