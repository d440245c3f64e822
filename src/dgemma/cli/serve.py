"""Serve a model over HTTP, compatible with OpenAI's clients.

Every flag has a variable, shown in brackets: the flag overrides it; variables of repeatable flags are
comma-separated. The log goes to stderr: lines for people on a terminal, else one JSON object per line.
SIGTERM or Ctrl-C finishes the accepted requests; a second signal ends at once. docs/server.md has the
endpoints, their fields and the metrics."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from socket import socket
from threading import Thread

from dgemma.cli.options import is_helper, joined_ranks
from dgemma.cli.playground_facts import playground_facts
from dgemma.cli.server_options import (
    LOAD_FLAGS,
    SERVER_FLAGS,
    add_flags,
    check_fit,
    open_service,
    read_flags,
    require_server_packages,
    served_name,
)
from dgemma.errors import InputError
from dgemma.server.http.settings import LoadOptions, Settings

EXAMPLES = (
    "examples:\n"
    "  dgemma serve MODEL --port 8000\n"
    "  DGEMMA_API_KEY=secret dgemma serve MODEL --host 0.0.0.0 --adapter sums=runs/sums/adapter\n"
    "  dgemma serve MODEL --max-num-seqs 32 --max-model-len 8192 --memory-fraction 0.8"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, bundled:text, or a hub name")
    add_flags(parser, Settings, SERVER_FLAGS)
    add_flags(parser, LoadOptions, LOAD_FLAGS)


def run(args: argparse.Namespace) -> int:
    require_server_packages()
    from dgemma.server.http.log import LOGGER, configure_log
    from dgemma.server.run import check_files, exit_without_threads, listen, serve

    # All that can be refused is refused before a large model is loaded; so is a port in use.
    settings = read_flags(Settings, SERVER_FLAGS, args, served_model_name=served_name(args.model))
    options = read_flags(LoadOptions, LOAD_FLAGS, args)
    check_files(settings)
    with ExitStack() as stack:
        helps = is_helper(settings.tensor_parallel)
        listener = None if helps else stack.enter_context(listen(settings.host, settings.port))
        check_fit(args.model, settings)
        configure_log(sys.stderr, settings.log_format)
        if settings.most_replicas > 1:
            return _serve_replicas(args.model, options, settings, listener)
        ranks = stack.enter_context(
            joined_ranks(args.model, settings.tensor_parallel, options.device, args.arguments)
        )
        engine, text = open_service(
            args.model, options, settings,
            queue_len=settings.queue_len, quiet=helps, log=LOGGER.info, **ranks,
        )  # fmt: skip
        if helps:
            engine.follow()
            return 0
        facts = playground_facts(args.model, settings, engine.model, text) if settings.playground else None
        serve(settings, engine, text, listener, facts)
    exit_without_threads(0)
    return 0


def _replace_on_hangup(replace_all: Callable[[], None]) -> None:
    """SIGHUP, as for servers that read their files again: new weights without a break."""

    def replace() -> None:
        from dgemma.server.http.log import LOGGER

        LOGGER.info("replacing all replicas")
        try:
            replace_all()
        except Exception:  # Ray's own are of many kinds; the old replicas serve on
            LOGGER.exception("the replicas were not replaced")
        else:
            LOGGER.info("all replicas are replaced")

    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=replace, daemon=True).start())


def _serve_replicas(model: str, options: LoadOptions, settings: Settings, listener: socket | None) -> int:
    """The server in this process, its engines in others."""
    from dgemma.checkpoint.hub import resolve
    from dgemma.server.http.log import LOGGER
    from dgemma.server.run import serve
    from dgemma.server.text import CheckpointText

    if settings.tensor_parallel > 1:
        raise InputError.about(
            "tensor_parallel",
            f"is {settings.tensor_parallel} with {settings.most_replicas} replicas; give one of them.",
        )
    try:
        from dgemma.ray import LocalReplicas
    except ImportError:
        raise InputError("replicas need Ray Serve; run: pip install 'dgemma[ray]'") from None
    path = resolve(model)  # on this machine once, before all replicas read it
    LOGGER.info("starting Ray and %d replicas, which takes a minute", settings.replicas)
    replicas = LocalReplicas(str(path), options, settings)
    with replicas as engine:
        _replace_on_hangup(replicas.replace_all)
        text = CheckpointText.of_files(path, engine.model)
        facts = playground_facts(model, settings, engine.model, text) if settings.playground else None
        serve(settings, engine, text, listener, facts)
    return 0
