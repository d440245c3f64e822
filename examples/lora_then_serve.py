"""Train an adapter on two facts, serve it beside its base, and ask both over HTTP with OpenAI's client.

Half a minute on one core. It needs `pip install "dgemma[server,train]" openai`.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

FACTS = {"What is the capital of France?": "Paris", "What is the capital of Spain?": "Madrid"}
STEPS = 80
DGEMMA = (sys.executable, "-m", "dgemma.cli.main")


def train_adapter(directory: Path) -> Path:
    """`dgemma train`, on one line of JSON for each fact."""
    data = directory / "facts.jsonl"
    data.write_text("".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in FACTS.items()))
    recipe = ("model=bundled:text", f"data={data}", "data.max_length=40", f"out={directory / 'run'}")
    schedule = (f"steps={STEPS}", "batch=2", "optimizer.learning_rate=5e-3")
    subprocess.run([*DGEMMA, "train", *recipe, *schedule], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    return directory / "run" / "adapter"


@contextmanager
def serving(adapter: Path) -> Iterator[str]:
    """`dgemma serve` with the names `base` and `facts` on a free port, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = ("--served-model-name", "base", "--adapter", f"facts={adapter}")
    server = subprocess.Popen(  # noqa: S603
        [*DGEMMA, "serve", "bundled:text", *names, "--port", str(port)], stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/ready", timeout=60).close()  # noqa: S310
                break
            except urllib.error.URLError:
                if server.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, serving(train_adapter(Path(scratch))) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="any")
        for question, fact in FACTS.items():
            answers = {}
            for model in ("base", "facts"):
                answer = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": question}], max_tokens=8, seed=1
                )
                answers[model] = answer.choices[0].message.content
            print(question, answers)
            assert answers["facts"] == fact != answers["base"]


if __name__ == "__main__":
    main()
