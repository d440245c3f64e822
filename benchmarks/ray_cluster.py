"""`dgemma.ray:app` on a Ray cluster of this machine: deployed, asked, deployed again under load, its quotas.

    python -m benchmarks.ray_cluster                 (needs dgemma[ray]; 10 minutes alone on two cores)

`ray start --head`, then `serve deploy` with deploy/serve-config.yaml, whose model is replaced by bundled:text
and whose limits by small ones. The answers are compared with those of a plain server, the quota of a key is
counted over two replicas, and a changed configuration replaces the replicas while requests run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from benchmarks import record
from benchmarks.load_server import BUNDLED, MODEL, served
from benchmarks.proxy import free_port
from benchmarks.replicas import REQUESTS, answer, ask_until, body_of, count_others, latencies, streamed

CONFIG = Path(__file__).parents[1] / "deploy" / "serve-config.yaml"
QUOTA = 20  # requests in a minute
_WITHIN_S = 300.0


@dataclass(frozen=True)
class Application:
    port: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {"model": MODEL, "replicas": 2}
    with served(threads=1) as plain:
        expected = [answer(plain, number) for number in range(REQUESTS)]
        findings["plain_s"] = latencies(plain)
    port = free_port()
    with cluster() as environment:
        began = time.perf_counter()
        deploy(config(port), environment)
        application = Application(port)
        wait_until_running(application)
        findings["deployed_after_s"] = round(time.perf_counter() - began, 1)
        found = [answer(application, number) for number in range(REQUESTS)]
        findings["requests"] = REQUESTS
        findings["other_texts_than_the_plain_server"] = count_others(found, expected)
        findings["streams"] = REQUESTS
        findings["other_streams"] = count_others(
            [streamed(application, number) for number in range(REQUESTS)], expected
        )
        findings["application_s"] = latencies(application)
        findings["new_configuration"] = deploy_again(application, expected, environment)
        findings["quota"] = spend_quota(application, environment)
    record.write("ray_cluster", findings, args.suffix)


def config(port: int, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    found["http_options"] = {**found["http_options"], "port": port}
    (application,) = found["applications"]
    del application["args"]["max_replicas"]
    application["args"] |= {
        "model": BUNDLED, "served_model_name": MODEL, "device": "cpu", "exact": True, "threads": 1,
        "max_model_len": 2048, **more,
    }  # fmt: skip
    return found


@contextmanager
def cluster() -> Iterator[Mapping[str, str]]:
    """A Ray of one machine that asks for a secret -> the environment in which its commands run."""
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_raylet_start_wait_time_s": "120",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            ray(
                ("start", "--head", "--num-cpus", "4", "--node-ip-address", "127.0.0.1", "--port",
                 str(free_port()), "--include-dashboard=true", "--dashboard-host", "127.0.0.1",
                 "--object-store-memory", str(100 << 20), "--temp-dir", scratch),
                environment,
            )  # fmt: skip
            yield environment
        finally:
            ray(("stop", "--force"), environment)


def ray(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    command = [str(Path(sys.executable).with_name("ray")), *argv]
    subprocess.run(command, env=dict(environment), check=True, stdout=subprocess.DEVNULL, timeout=_WITHIN_S)


def deploy(values: dict[str, Any], environment: Mapping[str, str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        command = [str(Path(sys.executable).with_name("serve")), "deploy", file.name]
        subprocess.run(
            command, env=dict(environment), check=True, stdout=subprocess.DEVNULL, timeout=_WITHIN_S
        )


def wait_until_running(application: Application) -> None:
    ends_at = time.monotonic() + _WITHIN_S
    while time.monotonic() < ends_at:
        try:
            if httpx2.get(f"http://127.0.0.1:{application.port}/v1/models", timeout=5).is_success:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the application did not start")


def statuses(environment: Mapping[str, str]) -> set[str]:
    """Of the application and its deployments, as `serve status` names them."""
    command = [str(Path(sys.executable).with_name("serve")), "status"]
    found = subprocess.run(
        command, env=dict(environment), check=True, capture_output=True, text=True, timeout=_WITHIN_S
    )
    (application,) = yaml.safe_load(found.stdout)["applications"].values()
    return {application["status"], *(each["status"] for each in application["deployments"].values())}


def deploy_again(
    application: Application, expected: list[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Fewer answers at once in each replica: other arguments, so new replicas, while requests run."""
    deploy(config(application.port, max_num_seqs=8), environment)
    seen: list[bool] = []

    def is_replaced() -> bool:
        seen.append(statuses(environment) == {"RUNNING", "HEALTHY"})
        return seen[-1] and not all(seen)  # it was not, and is again

    return ask_until(is_replaced, application, expected)


def spend_quota(application: Application, environment: Mapping[str, str]) -> dict[str, Any]:
    """Twice the requests that a key has in a minute, as fast as they come: over two replicas, one quota."""
    deploy(config(application.port, api_keys=["a-key"], requests_per_minute=QUOTA), environment)
    headers = {"authorization": "Bearer a-key"}
    ends_at = time.monotonic() + _WITHIN_S
    is_new = False
    while not is_new and time.monotonic() < ends_at:
        time.sleep(1)
        try:
            url = f"http://127.0.0.1:{application.port}/v1/models"
            is_new = httpx2.get(url, timeout=5).status_code == 401
            is_new = is_new and statuses(environment) == {"RUNNING", "HEALTHY"}
        except httpx2.HTTPError:
            continue
    body = body_of(0) | {"max_tokens": 1, "max_denoising_steps": 1}
    url = f"http://127.0.0.1:{application.port}/v1/completions"
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        codes = list(
            pool.map(
                lambda _: httpx2.post(url, json=body, headers=headers, timeout=60).status_code,
                range(2 * QUOTA),
            )
        )
    seconds = time.perf_counter() - began
    return {
        "requests_per_minute": QUOTA,
        "requests": len(codes),
        "seconds": round(seconds, 1),
        "answered": codes.count(200),
        "refused_429": codes.count(429),
        # The bucket is full at first, and is refilled while requests run.
        "at_most": QUOTA + int(seconds * QUOTA / 60) + 1,
    }


if __name__ == "__main__":
    main()
