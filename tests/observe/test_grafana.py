"""The dashboard and the list of metrics in docs/ say what /metrics says, and the dashboard is one
that Grafana takes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.cli import main as cli
from jaxserve.observe.adapter_metrics import AdapterMetrics
from jaxserve.observe.attained import Attained
from jaxserve.observe.metric_rows import OF_TRANSFERS, READ
from jaxserve.observe.metrics import Metrics
from jaxserve.observe.tenant_metrics import TenantMetrics
from jaxserve.server.frontend_metrics import FrontendMetrics, exposition
from jaxserve.settings import flags

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana" / "jaxserve.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\b(jaxserve:[a-z0-9_]+|process_[a-z_]+)")
NOT_SHOWN = {"process_start_time_seconds"}


@pytest.fixture(scope="module")
def families() -> dict:
    """By name, those of a server and its engine."""
    metrics = Metrics(
        4,
        ("chat",),
        lambda: dict.fromkeys(READ, 1.0),
        transfers=lambda: {("host:1", "tcp"): dict.fromkeys(OF_TRANSFERS, 1.0)},
    )
    metrics.registry.register(AdapterMetrics(lambda: (["a"], []), 4))
    metrics.registry.register(
        TenantMetrics(lambda: ({"a": 1.0}, {"a": 0.5}, {"a": Attained(4, 3, 40, 30)}))
    )
    front = FrontendMetrics()
    metrics.configured(
        block_size=16,
        num_gpu_blocks=10,
        cache_dtype="float32",
        enable_prefix_caching=True,
        placement="grow",
    )
    found = parse(exposition([metrics.registry, front.registry]).decode())
    return {family.name: family for family in found if not family.name.endswith("_created")}


def series(family) -> set[str]:
    """Names of its samples."""
    suffixes = (
        ("_bucket", "_sum", "_count")
        if family.type == "histogram"
        else ("_total",)
        if family.type == "counter"
        else ("",)
    )
    return {family.name + suffix for suffix in suffixes}


def labels(family) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_every_query_is_of_a_metric_that_there_is(families):
    known = set().union(*map(series, families.values()))
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked <= known and len(asked) > 30
    assert not {
        name
        for name in asked
        if "_bucket" in name and not any(f"by (le) (rate({name}" in e for e in expressions())
    }


def test_every_metric_is_in_some_panel(families):
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    missing = {name for name, family in families.items() if not series(family) & asked}
    assert missing == NOT_SHOWN


def test_labels_that_panels_group_by_are_there(families):
    for expression in filter(NAME.search, expressions()):
        (name, *_) = NAME.findall(expression)
        family = next(family for family in families.values() if name in series(family))
        grouped = {
            label.strip()
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for label in group.split(",")
        } - {"le"}
        assert grouped <= labels(family), expression


def test_queries_are_whole_and_of_the_chosen_instances():
    for expression in expressions():
        assert expression.count("(") == expression.count(")") and expression.count(
            "{"
        ) == expression.count("}")
        assert expression.count('{instance=~"$instance"}') == len(NAME.findall(expression)), (
            expression
        )
        for variable in re.findall(r"\$(\w+)", expression):
            assert variable in {
                "__rate_interval",
                *(one["name"] for one in BOARD["templating"]["list"]),
            }


def test_grafana_takes_it():
    assert BOARD["schemaVersion"] >= 36 and BOARD["uid"] and BOARD["title"]
    assert BOARD["templating"]["list"][0] == BOARD["templating"]["list"][0] | {
        "type": "datasource",
        "query": "prometheus",
    }
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        assert (
            panel["datasource"]["uid"] == "${datasource}"
            and panel["type"] in ("timeseries", "stat")
            and panel["title"]
        )
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_panels_do_not_overlap():
    boxes = [panel["gridPos"] for panel in BOARD["panels"]]
    for a, b in itertools.combinations(boxes, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart and a["x"] + a["w"] <= 24, (a, b)


def test_the_list_of_metrics_is_the_registrys(families):
    rows = re.findall(
        r"^\| `([a-z0-9_:]+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$",
        (DOCS / "operations.md").read_text(),
        re.M,
    )
    listed = {
        name: (kind, set(re.findall(r"\w+", labels)), help) for name, kind, labels, help in rows
    }
    told = {
        name.removeprefix("jaxserve:") + ("_total" if family.type == "counter" else ""): (
            family.type,
            labels(family),
            family.documentation.rstrip("."),
        )
        for name, family in families.items()
    }
    assert listed == told


def test_the_settings_in_the_docs_are_settings(tmp_path, monkeypatch):
    (example,) = re.findall(
        r"```yaml\n# server.yaml\n(.*?)```", (DOCS / "operations.md").read_text(), re.S
    )
    (tmp_path / "server.yaml").write_text(example)
    values = flags.parse(cli.load("serve"), [f"--config={tmp_path / 'server.yaml'}"])
    assert (
        values["max_model_len"] == 8192
        and values["log_format"] == "json"
        and values.origins.keys() - {"config"}
        == {line.split(":")[0] for line in example.splitlines()}
    )
