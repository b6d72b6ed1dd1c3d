"""The metrics for Prometheus, and the Grafana board that shows them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gt
from gt.core.errors import MEANINGS
from tests.web_dashboard.requests import ask, read, token_of

BOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


@pytest.fixture
def text(four_workers):
    with pytest.raises(Exception, match="index"):
        gt.ones(3)[gt.tensor([7])].sum().item()
    return read(gt.dashboard(), "/metrics").body.decode()


@pytest.fixture
def samples(text):
    families = text_string_to_metric_families(text)
    return {sample.name: family.samples for family in families for sample in family.samples}


def test_a_worker_has_counters_and_states(samples):
    assert {sample.labels["worker"] for sample in samples["gt_worker_ops_total"]} == {"0", "1", "2", "3"}
    assert samples["gt_workers"][0].value == 4
    states = {(s.labels["worker"], s.labels["state"]): s.value for s in samples["gt_worker_state"]}
    assert states["0", "idle"] == 1 and states["0", "running"] == 0


def test_failures_are_counted(samples):
    assert samples["gt_failed_ops_total"][0].value == 1
    assert samples["gt_lost_workers_total"][0].value == 0


def test_refusals_are_counted_by_the_kinds_that_the_page_explains(samples):
    assert {sample.labels["kind"]: sample.value for sample in samples["gt_refused_total"]} == dict.fromkeys(MEANINGS, 0)
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", page.partition("gt_refused_total")[2].partition("examples/")[0], re.MULTILINE
    )
    assert dict(rows) == MEANINGS


def test_the_token_may_be_in_the_address_or_in_a_header(embedded):
    board = gt.dashboard()
    assert ask(board.port, "/metrics").status == 403
    assert ask(board.port, f"/metrics?token={token_of(board)}").status == 200
    assert read(board, "/metrics").headers["content-type"].startswith("text/plain")


def test_the_grafana_board_uses_metrics_that_exist(text):
    board = json.loads(BOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name for expression in expressions for name in re.findall(r"\bgt_\w+", expression)}
    assert len(used) >= 10
    assert used <= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
