"""compose.yaml: its settings are ours, its services run what exists, and what listens is what is connected to."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.protocol.config import FIELDS, PREFIX, Config
from octavo.protocol.link_keys import client_keys, make_keys, server_keys
from octavo.protocol.settings.loading import load_config
from octavo.python.settings import LAUNCHER_FIELDS
from tests.fakes.images import hidden_kernels

ROOT = Path(__file__).parents[2]
OURS = ("gateway", "scheduler", "executor")
# Of one machine or of one process: what the stack chooses itself, or has no use for.
OWN_HTTP = {"host", "port", "uds", "metrics_port", "api_key", "shutdown_timeout_s"}
CHOSEN_HERE = {*LAUNCHER_FIELDS, *OWN_HTTP, "model", "served_model_name"}


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def environment(stack: dict[str, Any], service: str) -> dict[str, str]:
    """Return the variables of `service` as a container sees them while nothing is set outside."""
    variables = stack["services"][service]["environment"]
    return {name: _default(str(value)) for name, value in variables.items() if value is not None}


def _default(text: str) -> str:
    """Return `text` with each innermost ${NAME:-default} replaced by its default, until there is none."""
    while (replaced := re.sub(r"\$\{\w+(?::-([^${}]*))?\}", lambda found: found[1] or "", text)) != text:
        text = replaced
    return text


@pytest.mark.parametrize("service", OURS)
def test_each_process_can_read_its_settings(stack: dict[str, Any], service: str) -> None:
    variables = environment(stack, service)
    config = load_config({name: value for name, value in variables.items() if name.startswith(PREFIX)})
    assert config.model == "/var/cache/octavo/model"
    assert config.served_model_name == ("SmolLM2-135M-Instruct",)


def test_every_setting_reaches_the_processes(stack: dict[str, Any]) -> None:
    names = {*stack["x-settings"], *stack["services"]["pull"]["environment"]}
    passed_on = {name.removeprefix(PREFIX).lower() for name in names if name.startswith(PREFIX)}
    assert passed_on <= FIELDS.keys()
    assert FIELDS.keys() - passed_on == CHOSEN_HERE - {"model", "served_model_name"}


def test_the_key_reaches_the_gateways_alone(stack: dict[str, Any]) -> None:
    have_it = [
        name for name, service in stack["services"].items() if "OCTAVO_API_KEY" in service.get("environment", {})
    ]
    assert have_it == ["gateway"]


def test_what_connects_meets_what_is_bound(stack: dict[str, Any]) -> None:
    scheduler = environment(stack, "scheduler")
    for service, link in (("gateway", "FRONTEND"), ("executor", "BACKEND")):
        connected = environment(stack, service)[f"OCTAVO_{link}_ADDRESS"]
        assert connected == scheduler[f"OCTAVO_{link}_ADDRESS"].replace("*", "scheduler")


def test_each_process_has_the_keys_of_its_links_and_no_others(stack: dict[str, Any], tmp_path: Path) -> None:
    make_keys(tmp_path)
    for service in OURS:
        mounts = [mount for mount in stack["services"][service]["volumes"] if "keys" in mount]
        assert mounts == [f"{service}-keys:/keys/{service}:ro"]
        variables = environment(stack, service)
        assert variables["OCTAVO_LINK_KEYS_DIR"] == f"/keys/{service}"
        config = Config(
            frontend_address=variables.get("OCTAVO_FRONTEND_ADDRESS", ""),
            backend_address=variables.get("OCTAVO_BACKEND_ADDRESS", ""),
            link_keys_dir=str(tmp_path / service),
        )
        if service == "scheduler":
            assert None not in server_keys(config)
        else:
            assert client_keys(config, service, [config.frontend_address or config.backend_address]) is not None


def test_keys_are_made_once_before_anything_needs_them(stack: dict[str, Any], tmp_path: Path) -> None:
    keys = stack["services"]["keys"]
    assert set(keys["volumes"]) == {f"{service}-keys:/keys/{service}" for service in OURS}
    for service in OURS:
        assert stack["services"][service]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert "/keys/scheduler /keys/gateway /keys/executor" in (ROOT / "deploy" / "Dockerfile").read_text()
    # The command itself, on another directory: it makes them, and then leaves them alone.
    [*shell, script] = keys["command"]
    command = [*shell, script.replace("/keys", str(tmp_path)).replace("octavo", f"{sys.executable} -m octavo")]
    made = []
    for _ in range(2):
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        made.append({path: path.read_bytes() for path in tmp_path.rglob("*.key*")})
    assert len(made[0]) == 7
    assert made[0] == made[1]


def test_nginx_and_prometheus_ask_the_gateways_ports(stack: dict[str, Any]) -> None:
    gateway = environment(stack, "gateway")
    nginx = (ROOT / "deploy" / "nginx.conf").read_text()
    assert re.findall(r"proxy_pass http://(\S+);", nginx) == [f"$gateway:{gateway['OCTAVO_PORT']}"]
    assert re.findall(r"set \$gateway (\w+);", nginx) == ["gateway"]
    [published] = stack["services"]["nginx"]["ports"]
    assert f"listen {published.split(':')[-1]};" in nginx
    prometheus = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yml").read_text())
    [discovery] = prometheus["scrape_configs"][0]["dns_sd_configs"]
    assert (discovery["names"], discovery["port"]) == (["gateway"], int(gateway["OCTAVO_METRICS_PORT"]))


def test_nginx_never_sends_a_post_twice() -> None:
    nginx = (ROOT / "deploy" / "nginx.conf").read_text()
    assert re.findall(r"proxy_next_upstream (.*);", nginx) == ["error timeout"]
    assert "proxy_buffering off;" in nginx


@pytest.mark.parametrize("service", OURS)
def test_each_process_runs_supervised(stack: dict[str, Any], service: str) -> None:
    command = stack["services"][service]["command"]
    flags = ["--all-ranks"] if service == "executor" else []
    assert command == ["octavo", "supervise", *flags, "--", "python", "-P", "-m", f"octavo.{service}"]
    assert importlib.util.find_spec(f"{service}.__main__")


def test_probes_run_modules_that_exist(stack: dict[str, Any]) -> None:
    probes = [service["healthcheck"]["test"] for service in stack["services"].values() if "healthcheck" in service]
    modules = [probe[probe.index("-m") + 1] for probe in probes if "-m" in probe]
    assert modules
    assert all(importlib.util.find_spec(module) for module in modules)


def test_streams_get_the_time_to_end(stack: dict[str, Any]) -> None:
    grace_s = int(environment(stack, "gateway")["OCTAVO_SHUTDOWN_TIMEOUT_S"])
    for service in ("gateway", "nginx"):
        assert (
            int(stack["services"][service]["stop_grace_period"].removesuffix("s")) > grace_s + 8
        )  # supervise kills then


def test_files_that_are_mounted_are_there(stack: dict[str, Any]) -> None:
    mounts = [mount for service in stack["services"].values() for mount in service.get("volumes", [])]
    paths = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_no_volume_hides_the_kernels_of_the_image(stack: dict[str, Any]) -> None:
    service = stack["services"]["executor"]
    mounts = [mount.removesuffix(":ro").rsplit(":", 1)[1] for mount in service["volumes"]]
    assert "/var/cache/kernels" in mounts
    assert not hidden_kernels([*mounts, *service["tmpfs"]])


def test_images_have_all_packages_and_nothing_else() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/*.py")} - {"deploy", "docs", "examples", "tests"}
    others = {"LICENSE", "README.md", "deploy/requirements.py", "pyproject.toml", "requirements.lock"}
    assert kept == packages | others


def test_as_many_gpus_as_ranks_are_asked_for() -> None:
    executor = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]["executor"]
    [devices] = executor["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == "${OCTAVO_TENSOR_PARALLEL_SIZE:-1}"


@pytest.mark.parametrize("override", ["compose.gpu.yaml", "compose.rocm.yaml"])
def test_overrides_change_the_executor_alone(stack: dict[str, Any], override: str) -> None:
    services = yaml.safe_load((ROOT / override).read_text())["services"]
    assert list(services) == ["executor"]
    device = services["executor"]["build"]["args"]["DEVICE"]
    assert f"      {device})" in (ROOT / "deploy" / "Dockerfile").read_text()
