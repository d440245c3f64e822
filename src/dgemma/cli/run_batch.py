"""Answer a file of requests, in OpenAI's batch format, without a server.

Each line of IN is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}} (or the
url /v1/completions); a body means what it means to `dgemma serve`. OUT gets a line per request as it is
answered, in no order. The same command again continues: requests with a result are skipped.
The status is 1 if requests failed. Every flag has a variable, shown in brackets."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.cli.server_options import (
    BATCH_FLAGS,
    LOAD_FLAGS,
    add_flags,
    check_fit,
    open_service,
    read_flags,
    require_server_packages,
    served_name,
)
from dgemma.cli.views.progress import FirstFailures, count_progress
from dgemma.server.http.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from dgemma.server.batch.protocol import BatchRequests, BatchResult, BatchResults

EXAMPLES = (
    "examples:\n"
    "  dgemma run-batch MODEL requests.jsonl results.jsonl\n"
    "  dgemma run-batch MODEL requests.jsonl results.jsonl --served-model-name gpt-4o-mini --max-num-seqs 32"
)
# No client is waiting: an answer is not cut short because others were generated before it.
_REQUEST_TIMEOUT_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, bundled:text, or a hub name")
    parser.add_argument("input", metavar="IN", help="a file of requests, one JSON object per line")
    parser.add_argument("output", metavar="OUT", help="the file of results; one of an earlier run goes on")
    add_flags(parser, Settings, BATCH_FLAGS, request_timeout_s=_REQUEST_TIMEOUT_S)
    add_flags(parser, LoadOptions, LOAD_FLAGS)


def run(args: argparse.Namespace) -> int:
    require_server_packages()
    from dgemma.server.batch.protocol import BatchRequests, BatchResults
    from dgemma.server.run import check_files

    # All that can be refused is refused before a large model is loaded.
    settings = read_flags(
        Settings,
        BATCH_FLAGS,
        args,
        served_model_name=served_name(args.model),
        request_timeout_s=_REQUEST_TIMEOUT_S,
    )
    check_files(settings)
    options = read_flags(LoadOptions, LOAD_FLAGS, args)
    requests = BatchRequests(Path(args.input), max_line_bytes=settings.max_body_bytes)
    with BatchResults(Path(args.output), requests.ids) as results:
        total = len(requests.ids)
        try:
            if len(results.held) < total:
                _answer(args, options, settings, requests, results)
        except KeyboardInterrupt:
            print(
                f"dgemma run-batch: interrupted after {len(results.held)} of {total} requests; "
                "the same command goes on",
                file=sys.stderr,
            )
            return 130
    if results.num_failed:
        failed = f"{results.num_failed} of {total} requests failed"
        print(f"dgemma run-batch: {failed}; {args.output} has the reasons", file=sys.stderr)
    return 1 if results.num_failed else 0


def _answer(
    args: argparse.Namespace,
    options: LoadOptions,
    settings: Settings,
    requests: BatchRequests,
    results: BatchResults,
) -> None:
    from dgemma.server.batch.serving import answer_all, queue_len
    from dgemma.server.state import ServerState

    if results.held:
        print(f"going on from {args.output}, which has {len(results.held)} results", file=sys.stderr)
    check_fit(args.model, settings)
    engine, text = open_service(args.model, options, settings, queue_len=queue_len(settings))
    state = ServerState(settings=settings, engine=engine, text=text)
    with _progress(len(requests.ids), len(results.held)) as advance:

        def add(result: BatchResult) -> None:
            results.add(result)
            advance(result)

        asyncio.run(answer_all(state, requests.without(results.held), add))


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[BatchResult], None]]:
    failures = FirstFailures(more="more requests failed; the results have all reasons")

    def failure(result: BatchResult) -> str | None:
        if result.reason is None:
            return None
        return f"request {result.custom_id!r} failed with {result.status}: {result.reason}"

    with count_progress("run-batch", total, "requests", done=done) as advance:
        yield lambda result: advance(failures.lines(failure(result)))
