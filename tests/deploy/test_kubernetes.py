"""deploy/kubernetes: what kustomize makes of it is valid, and its parts fit each other and the code."""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import msgspec
import pytest
import yaml

from octavo.cli import build_parser
from octavo.protocol.config import PREFIX, Config
from octavo.protocol.config import SECRETS as CONFIG_SECRETS
from octavo.protocol.link_keys import check_ranks_link, client_keys, make_keys, server_keys
from octavo.protocol.settings.loading import load_config
from tests.fakes.images import hidden_kernels
from tests.fakes.kustomize import Manifest, build, name_of

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
# An overlay, and what a user may add to it.
BUILDS = {
    "cpu": ("cpu", ()),
    "cpu, autoscaled": ("cpu", ("hpa",)),
    "gpu": ("gpu", ()),
    "gpu, autoscaled and watched": ("gpu", ("keda", "service-monitor")),
    "multi-node": ("multi-node", ()),
    "multi-node, watched": ("multi-node", ("service-monitor",)),
}
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
SMALL, EXECUTOR = "octavo-small", "octavo-executor"
# Which secret each container may see.
SECRETS = {"pull": {"octavo-hub"}, "gateway": {"octavo-api-keys"}, "scheduler": set(), "executor": set()}
# Whose keys of links each container may see, for what leaves its pod.
KEYS = {"pull": set(), "gateway": {"octavo-gateway-keys"}, "scheduler": {"octavo-scheduler-keys"}, "executor": set()}
INJECTED = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "octavo-engine-0.octavo-engine.octavo"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests, with a folder for each of BUILDS beside them, as README.md has users make one."""
    tree = tmp_path_factory.mktemp("kubernetes")
    shutil.copytree(DEPLOY, tree, dirs_exist_ok=True)
    for name, (overlay, components) in BUILDS.items():
        (tree / name).mkdir()
        wanted = {"resources": [f"../overlays/{overlay}"], "components": [f"../components/{c}" for c in components]}
        (tree / name / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": "octavo", **wanted}))
    return tree


@pytest.fixture(scope="module")
def builds(tree: Path) -> dict[str, list[Manifest]]:
    return {name: build(tree / name) for name in BUILDS}


@pytest.fixture(params=BUILDS)
def manifests(builds: dict[str, list[Manifest]], request: pytest.FixtureRequest) -> list[Manifest]:
    return builds[request.param]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [manifest for manifest in manifests if name_of(manifest) == (kind, name)]
    return found


def templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield every pod template."""
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        yield manifest["spec"]["template"]
    for manifest in of_kind(manifests, "LeaderWorkerSet"):
        group = manifest["spec"]["leaderWorkerTemplate"]
        yield group["leaderTemplate"]
        yield group["workerTemplate"]


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for template in templates(manifests):
        yield from template["spec"]["initContainers"] + template["spec"]["containers"]


def labels(template: Manifest) -> set[tuple[str, str]]:
    return set(template["metadata"]["labels"].items())


def selected(manifests: list[Manifest], match_labels: dict[str, str]) -> list[Manifest]:
    """Return the pod templates that have the labels."""
    return [template for template in templates(manifests) if set(match_labels.items()) <= labels(template)]


def port_names(template: Manifest) -> dict[str, int]:
    ports = [port for container in template["spec"]["containers"] for port in container.get("ports", [])]
    return {port["name"]: port["containerPort"] for port in ports}


def config_of(container: Manifest, manifests: list[Manifest]) -> Config:
    """Return the Config that the container's process loads. Raises ConfigError for what is no setting."""
    environ: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            environ |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    environ |= {variable["name"]: variable["value"] for variable in container.get("env", [])}
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in expanded(container.get("args", [])))
    return load_config(environ, {name.replace("-", "_"): value for name, value in flags.items()})


def expanded(arguments: list[str]) -> list[str]:
    return [re.sub(r"\$\((\w+)\)", lambda found: INJECTED[found[1]], argument) for argument in arguments]


def comparable(node: Any) -> Any:
    """Return `node` with keys and the objects of each list in one order, on which nothing depends."""
    if isinstance(node, dict):
        return {key: comparable(node[key]) for key in sorted(node)}
    if isinstance(node, list):
        items = [comparable(item) for item in node]
        return sorted(items, key=json.dumps) if all(isinstance(item, dict) for item in items) else items
    return node


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
@pytest.mark.parametrize("name", ["cpu, autoscaled", "gpu, autoscaled and watched", "multi-node"])
def test_kustomize_makes_the_same_of_them(name: str, tree: Path, builds: dict[str, list[Manifest]]) -> None:
    done = subprocess.run(["kubectl", "kustomize", tree / name], capture_output=True, text=True, check=True)
    made = list(yaml.safe_load_all(done.stdout))
    assert comparable(made) == comparable(builds[name])


def native_forms(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the manifest, or, if Kubernetes itself does not know its kind, what of it Kubernetes does know."""
    match manifest["kind"]:
        case "LeaderWorkerSet":
            for template in templates([manifest]):
                yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
        case "ScaledObject":
            behavior = manifest["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            spec = {"scaleTargetRef": manifest["spec"]["scaleTargetRef"], "maxReplicas": 1, "behavior": behavior}
            name = {"name": "any"}
            yield {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": name, "spec": spec}
        case "ServiceMonitor":
            pass
        case _:
            yield manifest


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_they_keep_to_the_published_schemas(version: str, builds: dict[str, list[Manifest]]) -> None:
    forms = {json.dumps(form) for manifests in builds.values() for each in manifests for form in native_forms(each)}
    for form in forms:
        kubernetes_validate.validate(json.loads(form), version, strict=True)


def test_a_misspelt_field_is_no_valid_manifest(builds: dict[str, list[Manifest]]) -> None:
    deployment = copy.deepcopy(named(builds["cpu"], "Deployment", "octavo-gateway"))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_every_setting_is_one_that_the_processes_know(manifests: list[Manifest]) -> None:
    for container in containers(manifests):
        config = config_of(container, manifests)
        assert config.served_model_name
        if container["name"] != "pull":
            assert config.model == "/run/octavo/model"
    for name in SECRETS["gateway"]:
        assert f"secret generic {name} --from-literal={PREFIX}API_KEY=" in (DEPLOY / "README.md").read_text()


def test_every_command_is_one_of_ours(manifests: list[Manifest]) -> None:
    commands = [container["command"] for container in containers(manifests)]
    commands += [
        container["readinessProbe"]["exec"]["command"]
        for container in containers(manifests)
        if probes_by_exec(container)
    ]
    for command in commands:
        if command[:2] == ["sh", "-ec"]:
            assert command[2].startswith('model="$(octavo pull)"; ')
            build_parser("pull").parse_args(["pull"])
            continue
        if command[:2] == ["octavo", "supervise"]:
            build_parser("supervise").parse_args(command[1:])
            command = command[command.index("--") + 1 :]
        assert command[:3] == ["python", "-P", "-m"]
        [module] = command[3:]
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__")


def probes_by_exec(container: Manifest) -> bool:
    return "exec" in container.get("readinessProbe", {})


def test_only_executors_have_the_image_with_torch(manifests: list[Manifest]) -> None:
    for container in containers(manifests):
        assert container["image"].split(":")[0] == (EXECUTOR if container["name"] == "executor" else SMALL)


def test_selectors_match_pods(manifests: list[Manifest]) -> None:
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        assert set(manifest["spec"]["selector"]["matchLabels"].items()) <= labels(manifest["spec"]["template"])
    for manifest in of_kind(manifests, "Service"):
        assert selected(manifests, manifest["spec"]["selector"])
    for manifest in of_kind(manifests, "PodDisruptionBudget"):
        assert selected(manifests, manifest["spec"]["selector"]["matchLabels"])
    for manifest in of_kind(manifests, "NetworkPolicy"):
        assert selected(manifests, manifest["spec"]["podSelector"]["matchLabels"])
        peers = [peer for rule in manifest["spec"]["ingress"] for peer in rule.get("from", [])]
        assert all(selected(manifests, peer["podSelector"]["matchLabels"]) for peer in peers if "podSelector" in peer)
    for template in templates(manifests):
        for constraint in template["spec"].get("topologySpreadConstraints", []):
            assert template in selected(manifests, constraint["labelSelector"]["matchLabels"])


def test_every_pod_has_a_budget_and_a_policy(manifests: list[Manifest]) -> None:
    budgets = [budget["spec"]["selector"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    policies = [policy["spec"]["podSelector"] for policy in of_kind(manifests, "NetworkPolicy")]
    for template in templates(manifests):
        for selectors in (budgets, policies):
            assert [s for s in selectors if template in selected(manifests, s["matchLabels"])]


def test_ports_agree(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        for template in selected(manifests, service["spec"]["selector"])[:1]:
            assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == port_names(template)
            assert all(port["targetPort"] == port["name"] for port in service["spec"]["ports"])
    for policy in of_kind(manifests, "NetworkPolicy"):
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        [template, *_] = selected(manifests, policy["spec"]["podSelector"]["matchLabels"])
        assert allowed == port_names(template).keys()
    for template in templates(manifests):
        for container in template["spec"]["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for way in ("httpGet", "tcpSocket"):
                    if way in container.get(probe, {}):
                        assert container[probe][way]["port"] in port_names(template)


def test_processes_listen_where_their_ports_are(manifests: list[Manifest]) -> None:
    for template in templates(manifests):
        for container in template["spec"]["containers"]:
            config, ports = config_of(container, manifests), port_names(template)
            if container["name"] == "gateway":
                assert (config.host, config.port, config.metrics_port) == ("0.0.0.0", ports["http"], ports["metrics"])
            if container["name"] == "scheduler":
                assert config.frontend_address == f"tcp://0.0.0.0:{ports['scheduler']}"


def test_gateways_know_every_scheduler(manifests: list[Manifest]) -> None:
    [engine] = of_kind(manifests, "StatefulSet", "LeaderWorkerSet")
    service = named(manifests, "Service", "octavo-engine")
    assert engine["spec"].get("serviceName", engine["metadata"]["name"]) == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    [port] = service["spec"]["ports"]
    [gateway] = named(manifests, "Deployment", "octavo-gateway")["spec"]["template"]["spec"]["containers"]
    assert config_of(gateway, manifests).schedulers == tuple(
        f"tcp://octavo-engine-{number}.octavo-engine:{port['port']}" for number in range(engine["spec"]["replicas"])
    )


def test_scheduler_and_executor_of_a_pod_meet(manifests: list[Manifest]) -> None:
    for template in templates(manifests):
        pod = {container["name"]: container for container in template["spec"]["containers"]}
        if "scheduler" not in pod:
            continue
        address = config_of(pod["scheduler"], manifests).backend_address
        assert config_of(pod["executor"], manifests).backend_address == address
        directory = str(
            Path(urlsplit(address).path).parent.parent
        )  # the scheduler makes the last one, for itself alone
        for container in pod.values():
            assert {"name": "run", "mountPath": directory} in container["volumeMounts"]


def test_volumes_and_mounts_agree(manifests: list[Manifest]) -> None:
    claims = {manifest["metadata"]["name"] for manifest in of_kind(manifests, "PersistentVolumeClaim")}
    for template in templates(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = [m["name"] for c in containers_of(template) for m in c["volumeMounts"]]
        assert set(mounts) == volumes.keys()
        for volume in volumes.values():
            assert len(volume) == 2  # its name and one kind
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}


def containers_of(template: Manifest) -> list[Manifest]:
    return [*template["spec"]["initContainers"], *template["spec"]["containers"]]


def test_keys_reach_the_gateways_alone(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Secret")  # whoever applies this makes them
    for settings in of_kind(manifests, "ConfigMap"):
        assert not {PREFIX + name.upper() for name in CONFIG_SECRETS} & settings["data"].keys()
    for container in containers(manifests):
        found = {source["secretRef"]["name"] for source in container["envFrom"] if "secretRef" in source}
        assert found == SECRETS[container["name"]]
        assert not [variable for variable in container.get("env", []) if "valueFrom" in variable]


def test_each_process_has_the_keys_of_its_links_and_no_others(manifests: list[Manifest]) -> None:
    for template in templates(manifests):
        secrets = {v["name"]: v["secret"] for v in template["spec"]["volumes"] if "secret" in v}
        assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
        for container in containers_of(template):
            mounts = [mount for mount in container["volumeMounts"] if mount["name"] in secrets]
            assert {secrets[mount["name"]]["secretName"] for mount in mounts} == KEYS[container["name"]]
            keys_dir = config_of(container, manifests).link_keys_dir
            assert [keys_dir] == ([mount["mountPath"] for mount in mounts] or [""])
            assert all(mount["readOnly"] for mount in mounts)
    for kind in ("scheduler", "gateway"):
        command = f"secret generic octavo-{kind}-keys --from-file=keys/{kind}"
        assert command in (DEPLOY / "README.md").read_text()


def test_each_process_starts_with_the_links_that_it_is_given(manifests: list[Manifest], tmp_path: Path) -> None:
    """None is refused for a link to other machines without keys."""
    make_keys(tmp_path)
    for container in containers(manifests):
        kind, config = container["name"], config_of(container, manifests)
        if config.link_keys_dir:
            assert not config.insecure_links
            config = msgspec.structs.replace(config, link_keys_dir=str(tmp_path / kind))
        match kind:
            case "scheduler":
                frontend, backend = server_keys(config)
                assert frontend is not None
                assert backend is None  # ipc
            case "gateway":
                assert client_keys(config, kind, config.schedulers) is not None
            case "executor":
                check_ranks_link(config)
                assert client_keys(config, kind, [config.backend_address]) is None


def test_pods_may_do_no_more_than_they_must(manifests: list[Manifest]) -> None:
    for template in templates(manifests):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # else octavo-gateway's variables are taken for settings
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        for container in pod["containers"]:
            assert "memory" in container["resources"]["limits"]


def test_a_gateway_is_given_the_time_that_it_takes_to_end(manifests: list[Manifest]) -> None:
    pod = named(manifests, "Deployment", "octavo-gateway")["spec"]["template"]["spec"]
    [gateway] = pod["containers"]
    needed_s = gateway["lifecycle"]["preStop"]["sleep"]["seconds"] + config_of(gateway, manifests).shutdown_timeout_s
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_a_scheduler_that_is_down_restarts_no_gateway(manifests: list[Manifest]) -> None:
    [gateway] = named(manifests, "Deployment", "octavo-gateway")["spec"]["template"]["spec"]["containers"]
    paths = {probe: gateway[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/health"}


def test_one_autoscaler_alone_sets_the_number_of_gateways(manifests: list[Manifest]) -> None:
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    gateways = named(manifests, "Deployment", "octavo-gateway")
    assert len(scalers) <= 1
    assert ("replicas" in gateways["spec"]) is not bool(scalers)
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": gateways["metadata"]["name"]}


def test_the_scaled_object_asks_prometheus(builds: dict[str, list[Manifest]]) -> None:
    [scaler] = of_kind(builds["gpu, autoscaled and watched"], "ScaledObject")
    assert scaler["apiVersion"] == "keda.sh/v1alpha1"
    known = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"}
    assert scaler["spec"].keys() == known
    [trigger] = scaler["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert trigger["metadata"].keys() == {"serverAddress", "query", "threshold"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())  # KEDA takes nothing else
    assert f'namespace="{scaler["metadata"]["namespace"]}"' in trigger["metadata"]["query"]


def test_the_service_monitor_finds_the_gateways(builds: dict[str, list[Manifest]]) -> None:
    manifests = builds["multi-node, watched"]
    [monitor] = of_kind(manifests, "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [service] = [each for each in of_kind(manifests, "Service") if wanted <= each["metadata"]["labels"].items()]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def test_every_rank_is_started(manifests: list[Manifest]) -> None:
    """By the one container of an engine, or each by its own."""
    for container in containers(manifests):
        if container["name"] == "executor":
            has_number = any(argument.startswith("--rank=") for argument in container.get("args", []))
            assert ("--all-ranks" in container["command"]) != has_number


def test_no_volume_hides_the_kernels_of_the_image(manifests: list[Manifest]) -> None:
    mounts = [mount["mountPath"] for container in containers(manifests) for mount in container["volumeMounts"]]
    assert not hidden_kernels(mounts)


def test_ranks_of_a_group_are_numbered_and_meet_at_the_leader(builds: dict[str, list[Manifest]]) -> None:
    manifests = builds["multi-node"]
    [group] = of_kind(manifests, "LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert group["spec"].keys() == {"replicas", "startupPolicy", "networkConfig", "leaderWorkerTemplate"}
    leader, worker = templates([group])
    assert [container["name"] for container in leader["spec"]["containers"]] == ["scheduler", "executor"]
    assert worker["spec"]["containers"] == leader["spec"]["containers"][1:]
    [rank] = worker["spec"]["containers"]
    config = config_of(rank, manifests)
    assert config.rank == 1
    assert config.tensor_parallel_size == group["spec"]["leaderWorkerTemplate"]["size"]
    assert config.distributed_address == f"tcp://{INJECTED['LWS_LEADER_ADDRESS']}:29500"
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == 1
    policy = named(manifests, "NetworkPolicy", "octavo-engine")["spec"]
    assert {"from": [{"podSelector": policy["podSelector"]}]} in policy["ingress"]
