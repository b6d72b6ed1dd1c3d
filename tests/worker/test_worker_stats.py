"""Ops and tensors that workers count, and the path of a server's instruction log."""

from pathlib import Path

import pytest

import gt
from tests.subprocesses import finish, serving, start


def test_one_worker_counts_its_ops(embedded: None) -> None:
    x = gt.ones(8)
    before = gt.debug.get_worker_stats()[0]
    kept = [x + 1 for _ in range(5)]
    after = gt.debug.get_worker_stats()[0]
    assert (after.ops - before.ops, after.tensors - before.tensors, after.bytes - before.bytes) == (5, 5, 5 * 32)
    assert len(kept) == 5


@pytest.mark.parametrize("logs", [True, False])
def test_a_program_that_joins_a_server_is_told_where_the_log_is(tmp_path: Path, logs: bool) -> None:
    path = tmp_path / "server.log"
    environment = {"GT_INSTRUCTION_LOG": str(path)} if logs else {}
    with serving(1, **environment) as port:
        code, _, told = finish(
            start(
                "-c",
                "import gt; print(gt.ones(2).sum().item())",
                GT_SERVER=f"localhost:{port}",
                GT_INSTRUCTION_LOG="mine.log",
            )
        )
    assert code == 0
    (line,) = told.splitlines()
    assert line.startswith("gt: GT_INSTRUCTION_LOG=mine.log is not written by this program")
    assert (f"to {path}" in line) == logs
    assert ("set it where the server" in line) != logs


def test_work_waits_and_caches_are_counted(anywhere):
    before = gt.debug.get_worker_stats()
    x = gt.ones(64, 64)
    for _ in range(20):
        x = (x @ x) * 0.01
    after = gt.debug.get_worker_stats()
    assert all(after[worker].busy > before[worker].busy for worker in after)
    assert all(after[worker].waited >= before[worker].waited >= 0 for worker in after)
    assert after.call_cache.hits + after.call_cache.misses >= 41
    assert 0 < after.call_cache.misses < 10
    assert 0 < after.plan_cache.misses < 10 and after.plan_cache.hits > 30
