"""Dashboard and alerts name metrics that exist, with labels that exist, and Prometheus takes the rules."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily

from strataflux.daemon.histograms import HISTOGRAMS, INFOS
from strataflux.daemon.metrics import METRICS

MONITORING = Path(__file__).parents[3] / "systemd/monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = (MONITORING / "prometheus-alerts.yml").read_text()

ADDED = {"instance", "job", "le"}
"""Labels of Prometheus itself."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def exported() -> dict[str, set[str]]:
    """Every name that a scrape gives, and its labels."""
    found = {"strataflux_scrape_seconds": set[str]()}
    for declared in METRICS:
        suffix = "_total" if declared.kind is CounterMetricFamily else ""
        found[declared.name + suffix] = set(declared.labels)
    for histogram in HISTOGRAMS:
        for suffix in ("_bucket", "_sum", "_count"):
            found[histogram.name + suffix] = set(histogram.labels)
    for info in INFOS:
        found[f"{info.name}_info"] = set(info.labels)
    return found


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return found + re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)\n {8}\w", RULES)


def test_there_is_something_to_check() -> None:
    assert len(expressions()) > 30
    assert len(re.findall(r"- alert:", RULES)) == len(re.findall(r"\n {8}expr:", RULES)) >= 10


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_named_exists(expression: str) -> None:
    known = exported()
    names = set(re.findall(r"strataflux_\w+", expression))
    assert names
    assert names <= known.keys()


@pytest.mark.parametrize("expression", expressions())
def test_every_label_named_exists(expression: str) -> None:
    known = exported()
    labels = set[str]().union(*(known[name] for name in re.findall(r"strataflux_\w+", expression))) | ADDED
    used = set(re.findall(r"[{,]\s*(\w+)\s*=", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used |= {name.strip() for name in group.split(",")}
    assert used <= labels


def test_legends_name_labels_of_their_query() -> None:
    known = exported()
    for panel in panels():
        for target in panel["targets"]:
            names = re.findall(r"strataflux_\w+", target["expr"])
            labels = set[str]().union(*(known[name] for name in names)) | ADDED
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, panel["title"]


def test_panels_do_not_overlap_and_explain_themselves() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert all(panel["description"] for panel in panels())
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_what_to_do() -> None:
    for alert in RULES.split("- alert:")[1:]:
        assert "severity: " in alert
        assert "summary: " in alert
        assert "action: " in alert


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(MONITORING / "prometheus-alerts.yml")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RULES.count('- alert:')} rules found" in done.stdout


WASTE, HOT_SET = "StrataFluxPrefetchWaste", "StrataFluxHotSet"


@needs_promtool
@pytest.mark.parametrize(
    ("series", "alert", "fires"),
    [
        ({"prefetches_used_total": (1, 20), "prefetches_unused_total": (1, 80), "fills_total": (1, 900)}, WASTE, True),
        ({"prefetches_used_total": (1, 80), "prefetches_unused_total": (1, 20), "fills_total": (1, 900)}, WASTE, False),
        ({"prefetches_used_total": (1, 20), "prefetches_unused_total": (1, 80), "fills_total": (1, 9)}, WASTE, False),
        ({"hot_set_total": (1, 0.4)}, HOT_SET, True),
        ({"hot_set_total": (1, 0)}, HOT_SET, False),
    ],
)
def test_alerts_fire_when_they_should(
    tmp_path: Path, series: dict[str, tuple[int, float]], alert: str, fires: bool
) -> None:
    """Counters begin at a value and grow by another each minute, for an hour."""
    labels = 'instance="a",kind="kv",cause="prefetch"' if alert == WASTE else 'instance="a",op="save",result="failed"'
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    found = [{"labels": "{}", "value": 1}] if fires else []
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f"strataflux_{name}{{{labels}}}", "values": f"{first}+{more}x60"}
            for name, (first, more) in series.items()
        ],
        "promql_expr_test": [{"expr": query, "eval_time": "1h", "exp_samples": found}],
    }
    body = {"rule_files": [str(MONITORING / "prometheus-alerts.yml")], "evaluation_interval": "1m", "tests": [case]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(body))
    done = subprocess.run(["promtool", "test", "rules", str(path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, which is what promtool can check a query as."""
    rules = [
        {"record": f"query:{number}", "expr": expression.replace("$instance", ".*")}
        for number, expression in enumerate(expressions())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", str(path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
