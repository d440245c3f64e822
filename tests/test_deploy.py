"""The deployment files name options, ports and paths that exist; the server gets no more than it needs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dgemma import __version__
from dgemma.cli.main import build_parser
from dgemma.server.http.settings import LoadOptions, Settings
from server.served import app_of, ask

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
KNOWN = {
    "model",
    *Settings.__dataclass_fields__,
    *LoadOptions.__dataclass_fields__,
}
DRAIN_S = Settings.__dataclass_fields__["drain_timeout_s"].default


def read_yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def applications(name: str) -> list[dict[str, Any]]:
    (found,) = read_yaml(name)
    if "spec" in found:
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    return list(found["applications"])


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (found,) = read_yaml("compose.yaml")
    return dict(found)


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in read_yaml("kubernetes.yaml")}


@pytest.fixture(scope="module")
def pod(kubernetes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(kubernetes["Deployment"]["spec"]["template"]["spec"])


def unit() -> dict[str, list[str]]:
    """All entries of the systemd unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "dgemma.service").read_text().splitlines():
        if re.match(r"[A-Z]", line):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def instruction(name: str) -> list[str]:
    """The arguments of an instruction of the Containerfile, each time it stands there."""
    joined = CONTAINERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)


def parse(arguments: list[str]) -> argparse.Namespace:
    return build_parser(["serve"]).parse_args(arguments)


@pytest.mark.parametrize("name", ["serve-config.yaml", "ray-service.yaml"])
def test_an_application_has_only_options_of_the_server(name: str) -> None:
    (application,) = applications(name)
    assert application["import_path"] == "dgemma.ray:app"
    assert application["args"].keys() <= KNOWN
    values = {key: value for key, value in application["args"].items() if key in Settings.__annotations__}
    Settings(**values)


def test_every_file_parses_and_is_documented() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("scale.md", "install.md", "server.md"))
    for path in DEPLOY.iterdir():
        if path.suffix == ".yaml":
            assert read_yaml(path.name)
        if path.suffix == ".json":
            assert json.loads(path.read_text())
        if path.is_file():
            assert f"deploy/{path.name}" in pages


def test_the_commands_are_ones_of_the_command_line(compose: dict[str, Any], pod: dict[str, Any]) -> None:
    assert json.loads(instruction("ENTRYPOINT")[0]) == ["dgemma"]
    (line,) = unit()["ExecStart"]
    program, *arguments = shlex.split(line.replace("${MODEL}", "bundled:text"))
    assert program.endswith("/bin/dgemma")
    for found in (
        json.loads(instruction("CMD")[0]),
        compose["services"]["server"]["command"],
        pod["containers"][0]["args"],
        arguments,
    ):
        assert parse(found).command == "serve"


def test_every_variable_is_one_of_the_server() -> None:
    known = set(
        re.findall(r"DGEMMA_\w+", build_parser(["serve"]).parse_args(["serve", "x"]).parser.format_help())
    )
    assert "DGEMMA_PORT" in known
    of_compose = {"DGEMMA_MODEL"}  # which compose itself reads
    for name in ("Containerfile", "compose.yaml", "kubernetes.yaml", "dgemma.service"):
        assert set(re.findall(r"\bDGEMMA_\w+", (DEPLOY / name).read_text())) - of_compose <= known


def test_the_ports_agree(compose: dict[str, Any], kubernetes: dict[str, Any], pod: dict[str, Any]) -> None:
    (port,) = instruction("EXPOSE")
    assert f"DGEMMA_PORT={port}" in CONTAINERFILE
    assert Settings.__dataclass_fields__["port"].default == int(port)
    services = compose["services"]
    for service in services.values():  # of this machine only
        assert all(entry.startswith("127.0.0.1:") for entry in service["ports"])
    assert services["server"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (prometheus,) = read_yaml("prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"server:{port}"]}]
    assert pod["containers"][0]["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert kubernetes["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_the_probes_ask_what_the_server_answers(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
    assert paths == ["/health", "/health", "/ready"]
    assert "/health" in instruction("HEALTHCHECK")[0]
    app = app_of()
    for path in ("/health", "/ready", "/metrics"):
        assert ask(app, "GET", path).status_code == 200


def test_the_image_is_not_roots_and_has_no_builder() -> None:
    build, run = CONTAINERFILE.split("\nFROM ${BASE}\n")
    assert "FROM ${BASE} AS build" in build
    assert instruction("USER") == ["10001:10001"]
    assert "COPY --from=build /opt/dgemma /opt/dgemma" in run
    assert "pip" not in run.replace("PIP", "")
    assert "--require-hashes" in build
    for variable in ("HF_HOME", "XDG_CACHE_HOME", "HOME"):
        assert re.search(rf"\b{variable}=/cache\b", CONTAINERFILE)
    assert instruction("VOLUME") == ["/cache"]


def test_what_the_image_is_built_from_is_not_ignored() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    needed = re.findall(r'^(?:packages = \["|"?)([a-z]+)', wheel_section(), re.MULTILINE)
    assert {"src", "man", "docs"} <= set(needed)
    assert not ignored & {*needed, "deploy", "pyproject.toml", "README.md", "LICENSE"}


def wheel_section() -> str:
    """The tables of pyproject.toml that say what the wheel has."""
    text = (ROOT / "pyproject.toml").read_text()
    tables = re.findall(
        r"^\[tool\.hatch\.build\.targets\.wheel.*?\]\n(.*?)(?=^\[)", text, re.MULTILINE | re.DOTALL
    )
    return "".join(tables)


def test_services_of_compose_are_confined(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")
        assert service.get("user", "10001:10001")[0] != "0"
    server = compose["services"]["server"]
    assert server["tmpfs"] == ["/tmp"]  # noqa: S108
    assert "cache:/cache" in server["volumes"]
    assert server["stop_grace_period"] == "150s"


def test_compose_mounts_files_that_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file()
                assert volume.endswith(":ro")
            else:
                assert source in compose["volumes"]
    (prometheus,) = read_yaml("prometheus.yaml")
    assert [(DEPLOY / name).is_file() for name in prometheus["rule_files"]] == [True]


def test_grafana_gets_its_dashboard_and_the_prometheus_of_compose(compose: dict[str, Any]) -> None:
    (datasource,) = read_yaml("grafana-datasource.yaml")
    assert datasource["datasources"][0]["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in compose["services"]["prometheus"]["ports"]
    (dashboards,) = read_yaml("grafana-dashboards.yaml")
    directory = dashboards["providers"][0]["options"]["path"]
    assert any(f"{directory}/dgemma.json" in volume for volume in compose["services"]["grafana"]["volumes"])


def test_the_pod_is_confined(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= container["resources"].keys()
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/cache", "/tmp"} <= set(mounted.values())  # noqa: S108


def test_selectors_find_the_pods(kubernetes: dict[str, Any]) -> None:
    labels = kubernetes["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kubernetes["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes["Service"]["spec"]["selector"] == labels
    claim = kubernetes["PersistentVolumeClaim"]["metadata"]["name"]
    volumes = kubernetes["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": claim} in [volume.get("persistentVolumeClaim") for volume in volumes]


def test_accepted_requests_have_time_to_finish(compose: dict[str, Any], pod: dict[str, Any]) -> None:
    assert isinstance(DRAIN_S, float)
    assert float(compose["services"]["server"]["stop_grace_period"].rstrip("s")) > DRAIN_S
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    assert float(unit()["TimeoutStopSec"][0]) > DRAIN_S


def test_the_unit_is_confined() -> None:
    found = unit()
    assert found["DynamicUser"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["CapabilityBoundingSet"] == [""]
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert found[key] == ["yes"]
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert "%C/dgemma" in " ".join(found["Environment"])
    assert found["CacheDirectory"] == ["dgemma"]


def test_images_have_our_version() -> None:
    for name in ("compose.yaml", "kubernetes.yaml", "ray-service.yaml"):
        images = re.findall(r"image: \S*(dgemma\S*):(\S+)", (DEPLOY / name).read_text())
        assert images
        assert {tag for _, tag in images} == {__version__}
