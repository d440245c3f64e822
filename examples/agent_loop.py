"""An agent with three tools: the model names the next call and its arguments until a tool has nothing to say.

`bundled:forms` is asked over `/v1/responses`. Its answer is one record, constrained to the schemas of the
tools: its type is the tool, its other fields are the arguments. What a tool returns is the next message.

The model decides which tool is called, and with which arguments. The program decides what a tool does and
what it answers, and that the loop ends when it answers nothing, or after MOST_STEPS.
"""

import datetime
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dgemma.forms.record_types import RECORD_TYPES, any_schema, grounded, make_prompt

TODAY = datetime.date(2026, 11, 18)
MESSAGES = (
    "temperature of sensor T12 is 21.5 C at 14:05 today",
    "temperature of sensor T12 is 31.5 C at 15:40 today",
)
TOO_WARM = 28
MOST_STEPS = 5


def measurement(record: dict[str, Any]) -> str:
    """Compare a reading with its limit."""
    if record["quantity"] != "temperature" or record["value"] <= TOO_WARM:
        return ""
    return f'level=error service=cooling code=503 msg="{record["sensor"]} is too warm"'


def log(record: dict[str, Any]) -> str:
    """File a log entry; ask for a repair after an error."""
    if record["level"] != "error":
        return ""
    return f"Repair of {record['service']} with Ann Hill tomorrow at 9:00, in Rome"


def appointment(record: dict[str, Any]) -> str:
    """Put an appointment into the calendar."""
    return ""


TOOLS = {"measurement": measurement, "log": log, "appointment": appointment}


def next_call(address: str, message: str) -> dict[str, Any]:
    """The model's choice of a tool and its arguments."""
    schema = any_schema({name: RECORD_TYPES[name] for name in TOOLS})
    body = {
        "model": "forms",
        "input": make_prompt(None, message, TODAY),
        # Names and numbers of the arguments are words of the message.
        "text": {"format": {"type": "json_schema", "name": "call", "schema": grounded(schema, message)}},
        "seed": 0,
        "store": False,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
        answer = json.load(response)
    call: dict[str, Any] = json.loads(answer["output"][0]["content"][0]["text"])
    return call


def run_agent(address: str, message: str) -> None:
    for _ in range(MOST_STEPS):
        print(f"message  {message}")
        call = next_call(address, message)
        name = call.pop("type")
        print(f"call     {name} {json.dumps(call)}")
        message = TOOLS[name](call)
        if not message:
            print("done\n")
            return
    print(f"stopped after {MOST_STEPS} calls\n")


@contextmanager
def serving() -> Iterator[str]:
    """`dgemma serve bundled:forms` on a free port, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dgemma.cli.main", "serve", "bundled:forms", "--dtype", "float32"]
    server = subprocess.Popen(  # noqa: S603
        [*command, "--served-model-name", "forms", "--port", str(port), "--log-format", "json"],
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/ready", timeout=60).close()  # noqa: S310
                break
            except urllib.error.URLError:
                if server.poll() is not None:
                    raise SystemExit("the server did not start; run: pip install 'dgemma[server]'") from None
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    with serving() as address:
        for message in MESSAGES:
            run_agent(address, message)


if __name__ == "__main__":
    main()
