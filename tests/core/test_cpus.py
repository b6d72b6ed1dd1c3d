"""The CPUs that a process may use: its affinity, and the quota of its container."""

import os

import pytest

from gt.core.environment import usable_cpus

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, HERE),
        ({"cpu.max": "max 100000\n"}, HERE),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "190000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, min(HERE, 64)),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, HERE),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_limits_the_cpus(tmp_path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == cpus


def test_the_affinity_of_the_process_limits_the_cpus(one_cpu, tmp_path):
    assert usable_cpus(tmp_path) == 1
