"""deploy/monitoring: rules and board ask for metrics that exist, aggregated as what they are."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from octavo.gateway.measuring.engine_metrics import EngineCollector
from octavo.gateway.measuring.metrics import Metrics
from octavo.protocol.messages import Ready, Stats

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
NAME = re.compile(r"\b(?:octavo:|process_)\w+")
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
ENGINE_AGGREGATION = re.compile(r"max by \(model_name, engine(, \w+)?\)\s*\(")


def sample_names(families: Iterator[Metric] | list[Metric]) -> set[str]:
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


@pytest.fixture(scope="module")
def gateway_names() -> set[str]:
    """What a gateway measures itself."""
    return sample_names(list(Metrics("m").registry.collect()))


@pytest.fixture(scope="module")
def engine_names() -> set[str]:
    """What a gateway repeats of each engine."""
    ready = Ready("s", "f", vocab_size=1, max_model_len=1, block_size=1, num_blocks=1, max_num_seqs=1)
    stats = Stats("s", *[0] * 11)
    engine: Any = SimpleNamespace(reports={0: (ready, stats)})
    return sample_names(list(EngineCollector(engine, "m").collect()))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board() -> dict[str, Any]:
    return json.loads((MONITORING / "grafana" / "dashboards" / "octavo.json").read_text())


def board_expressions() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]


def scaler_query() -> str:
    path = DEPLOY / "kubernetes" / "components" / "keda" / "scaled-object.yaml"
    return yaml.safe_load(path.read_text())["spec"]["triggers"][0]["metadata"]["query"]


def all_expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + board_expressions() + [scaler_query()]


def test_every_metric_that_is_asked_for_exists(gateway_names: set[str], engine_names: set[str]) -> None:
    variables = board()["templating"]["list"]
    queries = [variable["query"]["query"] for variable in variables if variable["type"] == "query"]
    text = "\n".join([*all_expressions(), *queries])
    asked = set(NAME.findall(text))
    assert asked - gateway_names - engine_names == set()
    assert {name.split(":")[0] for name in asked} >= {"octavo", "process_resident_memory_bytes"}


def test_what_every_replica_repeats_counts_once(gateway_names: set[str], engine_names: set[str]) -> None:
    """An engine's figure summed over the pages of N gateways would be N times too much."""
    for expression in all_expressions():
        if expression.startswith("absent("):
            continue
        for found in NAME.finditer(expression):
            enclosing = list(calls_around(expression, found.start()))
            is_once = any(ENGINE_AGGREGATION.fullmatch(call) for call in enclosing)
            assert is_once is (found[0] in engine_names), f"{found[0]} in {expression}"
            if found[0] in gateway_names and found[0].endswith("_bucket"):
                assert any(call.startswith("sum by (") for call in enclosing), expression


def calls_around(expression: str, position: int) -> Iterator[str]:
    """Yield what opens each parenthesis around `position`: a function or aggregation with its labels."""
    depth = 0
    for index in range(position - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(expression[index], 0)
        if depth < 0:
            depth = 0
            opened = re.search(r"(\w+( by \([^()]*\))?\s*)?\($", expression[: index + 1])
            assert opened is not None
            yield opened[0]


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_gateways_are_one_job_however_they_are_found() -> None:
    [scrape] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    monitor = yaml.safe_load((DEPLOY / "kubernetes/components/service-monitor/service-monitor.yaml").read_text())
    [endpoint] = monitor["spec"]["endpoints"]
    [relabeling] = endpoint["relabelings"]
    jobs = {job for rule in rules() for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert jobs == {scrape["job_name"]} == {relabeling["replacement"]}
    assert relabeling["targetLabel"] == "job"


def test_the_board_has_no_two_panels_in_one_place() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert not (overlap(one, other, "x", "w") and overlap(one, other, "y", "h")), (one, other)
    for panel in panels:
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def overlap(one: dict[str, int], other: dict[str, int], start: str, size: str) -> bool:
    return one[start] < other[start] + other[size] and other[start] < one[start] + one[size]


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")
def test_alerts_fire_when_they_should() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
