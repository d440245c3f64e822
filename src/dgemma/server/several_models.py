"""Several models behind one port: an app of its own for each, by the first part of the path.

The page is there at once; a model is loaded when its first request comes, or in the background before that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dgemma.errors import DgemmaError
from dgemma.server.http.errors import ApiError, error_response
from dgemma.server.http.health import HEALTH_PATH, READY_PATH
from dgemma.server.http.log import LOGGER
from dgemma.server.http.middleware import RequestMiddleware, check_host
from dgemma.server.http.settings import Settings
from dgemma.server.http.web_files import file_response, web_files
from dgemma.server.playground import FACTS_PATH, PlaygroundFacts, facts_response

Load = Callable[[], RequestMiddleware]


class SeveralModelsState:
    """What the server process asks of its app: the sum over all models that are loaded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.apps: dict[str, RequestMiddleware] = {}
        self.is_draining = False

    @property
    def num_active(self) -> int:
        return sum(app.state.num_active for app in self.apps.values())

    @property
    def failure(self) -> str | None:
        return next((why for app in self.apps.values() if (why := app.state.failure) is not None), None)

    async def drain(self) -> bool:
        self.is_draining = True
        began = time.monotonic()
        finished = await asyncio.gather(*(app.state.drain() for app in self.apps.values()))
        return all(finished) and time.monotonic() - began <= self.settings.drain_timeout_s


class SeveralModels:
    """The ASGI application. Requests below `/text` go to the model of that base, without it in the path."""

    def __init__(self, settings: Settings, loads: Mapping[str, Load], facts: PlaygroundFacts) -> None:
        """loads: by base, such as `/text`, what makes its app; called once, in a thread."""
        self.state = SeveralModelsState(settings)
        self._loads = dict(loads)
        self._facts = facts
        self._loading = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        try:
            app = await self._app_of(scope)
        except ApiError as error:
            app = error_response(error)
        await app(scope, receive, send)

    def load_all(self) -> None:
        """Load one model after another in the background. Called in the event loop."""
        self._background = asyncio.create_task(self._load_all())

    async def _load_all(self) -> None:
        for base in self._loads:
            try:
                await self._model(base)
            except ApiError as error:
                LOGGER.error("%s", error)

    async def _app_of(self, scope: Scope) -> ASGIApp:
        path: str = scope["path"]
        first, slash, rest = path[1:].partition("/")
        if slash and (base := f"/{first}") in self._loads:
            app = await self._model(base)
            # Its routes, log lines and metrics are those of a server with this model alone.
            scope.update({"path": f"/{rest}", "raw_path": f"/{rest}".encode(), "root_path": ""})
            return app
        check_host(scope, self.state.settings)
        return self._own(Request(scope))

    def _own(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise ApiError("this address takes GET only.", status=405, code="wrong_method")
        path = request.url.path
        if path in web_files():
            return file_response(request, path)
        if path == FACTS_PATH:
            return facts_response(self._facts)
        if path in (HEALTH_PATH, READY_PATH):
            status = 503 if self.state.is_draining or self.state.failure else 200
            return Response(
                b'{"status":"ok"}' if status == 200 else b'{"status":"unavailable"}',
                status_code=status,
                media_type="application/json",
            )
        bases = ", ".join(self._loads)
        raise ApiError(f"there is nothing here; models are below {bases}.", status=404, code="not_found")

    async def _model(self, base: str) -> RequestMiddleware:
        async with self._loading:
            if base not in self.state.apps:
                if self.state.is_draining:
                    raise ApiError("the server ends.", status=503, code="draining")
                try:
                    self.state.apps[base] = await asyncio.to_thread(self._loads[base])
                except DgemmaError as error:
                    raise ApiError(
                        f"the model of {base} cannot be loaded: {error}", status=503, code="not_loaded"
                    ) from None
            return self.state.apps[base]
