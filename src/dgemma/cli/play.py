"""Open the playground in the browser: write text, and watch the canvas while it is written.

Without MODEL all bundled models are there: chat, fill, edit, decide, Sudoku and forms, offline. With one, it
is `dgemma serve MODEL --traces`, and its page, which uses the public endpoints only. Ctrl-C ends."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from dgemma.cli.options import thread_count
from dgemma.cli.playground_facts import bundled_facts, playground_facts
from dgemma.cli.server_options import open_service, require_server_packages, served_name
from dgemma.server.http.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from dgemma.server.http.middleware import RequestMiddleware

EXAMPLES = "examples:\n  dgemma play\n  dgemma play my-model --port 8080\n  dgemma play --no-open"
BUNDLED = {"/text": "text", "/sudoku": "sudoku", "/forms": "forms"}
_PORT = 8765


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint directory, or a hub name (default: bundled)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"default: {_PORT}, or any free one if it is in use"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address, and open no browser")
    parser.add_argument("--threads", type=thread_count, metavar="N", help="of the processor (default: auto)")


def run(args: argparse.Namespace) -> int:
    require_server_packages()
    from dgemma.errors import InputError
    from dgemma.server.http.log import LOGGER, configure_log
    from dgemma.server.run import exit_without_threads, listen, serve, serve_app
    from dgemma.server.several_models import SeveralModels

    settings = Settings(
        host=args.host,
        port=_PORT if args.port is None else args.port,
        traces=True,
        # A page of one person: three models share what is free.
        memory_fraction=0.9 if args.model else 0.2,
        served_model_name=served_name(args.model) if args.model else "dgemma",
    )
    options = LoadOptions(threads=args.threads)
    try:
        listener = listen(settings.host, settings.port)
    except InputError:
        if args.port is not None:
            raise
        listener = listen(settings.host, 0)
    with listener:
        configure_log(sys.stderr, settings.log_format)
        if args.model is not None:
            engine, text = open_service(
                args.model, options, settings, queue_len=settings.queue_len, log=LOGGER.info
            )
            facts = playground_facts(args.model, settings, engine.model, text)
            serve(settings, engine, text, listener, facts, partial(_tell, opens=not args.no_open))
        else:
            loads = {base: partial(_load, name, settings, options) for base, name in BUNDLED.items()}
            app = SeveralModels(settings, loads, bundled_facts(BUNDLED))

            def started(address: str) -> None:
                _tell(address, opens=not args.no_open)
                app.load_all()

            serve_app(app, listener, started)
    exit_without_threads(0)
    return 0


def _load(name: str, settings: Settings, options: LoadOptions) -> RequestMiddleware:
    """An ordinary server's app of a bundled model."""
    from dataclasses import replace

    from dgemma.server.app import create_app

    model = f"bundled:{name}"
    own = replace(settings, served_model_name=model, playground=False)
    engine, text = open_service(model, options, own, queue_len=own.queue_len, log=lambda _: None)
    return create_app(own, engine, text)


def _tell(address: str, *, opens: bool) -> None:
    print(f"the playground is at {address}/", flush=True)
    if opens and has_display():
        import webbrowser

        # A browser may take its time to start.
        threading.Thread(target=webbrowser.open, args=(f"{address}/",), daemon=True).start()


def has_display() -> bool:
    """Else `webbrowser` would start a text browser in this terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
