"""Serve a model over HTTP, in the form that OpenAI's clients speak.

Every flag has a variable, shown in brackets: the flag wins, variables of flags that may be repeated have
commas. The log is one JSON object per line on stderr. SIGTERM or Ctrl-C finishes what was accepted; once more
ends at once. docs/server.md has the endpoints, their fields and the metrics."""

from __future__ import annotations

import argparse
import sys

from dgemma.cli.served_model import (
    LoadOptions,
    check_fit,
    open_service,
    require_server_packages,
    served_name,
)
from dgemma.cli.server_flags import LOAD_FLAGS, SERVER_FLAGS, add_flags, read_flags
from dgemma.server.settings import Settings

HELP = "serve a model over HTTP, to OpenAI's clients"
EXAMPLES = (
    "examples:\n"
    "  dgemma serve MODEL --port 8000\n"
    "  DGEMMA_API_KEY=secret dgemma serve MODEL --host 0.0.0.0 --adapter sums=runs/sums/adapter\n"
    "  dgemma serve MODEL --max-num-seqs 32 --max-model-len 8192 --memory-fraction 0.8"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, or a hub name")
    add_flags(parser, Settings, SERVER_FLAGS)
    add_flags(parser, LoadOptions, LOAD_FLAGS)


def run(args: argparse.Namespace) -> int:
    require_server_packages()
    from dgemma.server.log import LOGGER, configure_log
    from dgemma.server.run import listen, serve

    # All that can be refused is refused before a large model is loaded; so is a port in use.
    settings = read_flags(Settings, SERVER_FLAGS, args, served_model_name=served_name(args.model))
    options = read_flags(LoadOptions, LOAD_FLAGS, args)
    with listen(settings.host, settings.port) as listener:
        check_fit(args.model, settings)
        configure_log(sys.stderr)
        engine, text = open_service(
            args.model, options, settings, queue_len=settings.queue_len, say=LOGGER.info
        )
        serve(settings, engine, text, listener)
    return 0
