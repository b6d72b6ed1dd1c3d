"""Scopes resolved for the workers of a session: configured, unknown, and of workers that are not connected."""

from __future__ import annotations

import logging

import pytest
import torch

import gt
from gt import ShardConfig, SignalConfig
from gt.client import active_session
from gt.core.errors import SignalError
from tests.signals.recorded_scopes import configure, layout_and_workers

pytestmark = pytest.mark.usefixtures("no_signals")


def test_registering_again_counts_from_the_next_op(four_workers):
    with gt.signal.context("s"):
        first = gt.zeros(4, 4)
        configure("s", 0, [0, 1])
        second = gt.zeros(4, 4)
        configure("s", 1, [2, 3])
        third = gt.zeros(4, 4)
    assert [layout_and_workers(x) for x in (first, second, third)] == ["w, - on 0 1 2 3", "w, - on 0 1", "-, w on 2 3"]


def test_a_signal_without_configuration_is_logged_once(four_workers, caplog):
    with caplog.at_level(logging.INFO, "gt.signals"):
        for _ in range(3):
            with gt.signal.context("nowhere"):
                gt.zeros(2)
    assert [record.message for record in caplog.records] == [
        "signal 'nowhere' has no configuration and changes nothing"
    ]


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [({"dp": 2}, (4,)), ({"dp": 8}, (4,)), ({"dp": 1, "tp": 2}, (2, 2)), ({"dp": 1, "tp": 3}, (1, 3))],
)
def test_a_grid_of_all_workers_has_a_first_axis_that_fits(four_workers, mesh, shape):
    configure("grid", mesh=mesh, dims=["dp"], workers="all")
    configure("row", 0, "all")
    with gt.signal.context("grid"):
        assert gt.zeros(8, 2).spec.mesh.shape == shape
    with gt.signal.context("row"):
        assert gt.zeros(8, 2).spec.mesh.workers == (0, 1, 2, 3)


def test_all_workers_are_too_few_for_the_other_axes(four_workers):
    configure("wide", mesh={"dp": 2, "tp": 5}, dims=["tp"], workers="all")
    with pytest.raises(SignalError, match="needs workers 0 to 4"), gt.signal.context("wide"):
        gt.zeros(5)


def test_workers_that_are_not_connected(four_workers):
    configure("s", 0, [2, 5])
    message = r"'s' needs workers \[2, 5\].*GT_WORKERS=6 or gt.init\(workers=6\)"
    with pytest.raises(SignalError, match=message), gt.signal.context("s"):
        gt.zeros(2)
    configure("big", mesh={"dp": 4, "tp": 2}, dims=["dp"], workers=None)
    with pytest.raises(SignalError, match=r"needs workers 0 to 7.*GT_WORKERS=8"), gt.signal.context("big"):
        gt.zeros(2)
    assert gt.zeros(2).sum().item() == 0


def test_a_file_that_names_workers_that_are_not_connected(four_workers, tmp_path):
    path = tmp_path / "signals.yaml"
    path.write_text("first: {shard: {axis: 0}}\nlate:\n  shard: {axis: 0, workers: [0, 9]}\n")
    gt.load_config(path)
    with (
        pytest.raises(SignalError, match=r"signals.yaml:2: signal 'late' needs.*GT_WORKERS=10"),
        gt.signal.context("late"),
    ):
        gt.zeros(2)


def test_compile_reaches_the_workers(four_workers):
    gt.register_config("s", SignalConfig(ShardConfig(0, [0, 1]), compile=True))
    with gt.signal.context("s"):
        gt.zeros(4)
    gt.synchronize()
    executors = active_session.current().channel.executors
    scopes = [scope for executor in executors for scope in executor.scopes.defined()]
    assert {(scope.name, scope.compile) for scope in scopes} == {("s", True)}


@pytest.mark.parametrize(
    ("setting", "shape", "expected"),
    [
        (None, (8, 3), "w, -"),
        (None, (7, 4), "-, -"),
        (None, (8,), "-"),
        (None, (4, 4, 4), "-, -, -"),
        (False, (8, 3), "-, -"),
        (True, (7, 4), "w, -"),
        (True, (8,), "w"),
        (True, (4, 4, 4), "w, -, -"),
        (True, (2, 2), "w, -"),
        (True, (), ""),
    ],
)
def test_created_tensors_are_shared_among_all_workers(monkeypatch, setting, shape, expected):
    if setting is not None:
        monkeypatch.setenv("GT_AUTO_SHARD", str(int(setting)))
    gt.init(workers=4, mode="virtual")
    made = [gt.zeros(shape), gt.randn(shape), torch.zeros_like(gt.zeros(shape))]
    with gt.device():
        made.append(torch.ones(shape))
    assert [str(x.spec) for x in made] == [expected] * 4
    for host in (gt.tensor(torch.ones(shape)), gt.to(torch.ones(shape)), gt.from_numpy(torch.ones(shape).numpy())):
        assert host.spec.is_whole, "host data is not cut"
    gt.shutdown()
