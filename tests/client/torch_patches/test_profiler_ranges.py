"""The starts and ends of profilers, and ranges in their records: what GT uses of torch."""

import torch

from gt.client.torch_patches import profiler_ranges
from gt.client.torch_patches.profiler_ranges import follow_profilers, profiler_range


def test_the_start_and_the_end_of_a_profiler_are_noted(monkeypatch):
    for name in ("_run_on_profiler_start", "_run_on_profiler_stop"):
        monkeypatch.setattr(profiler_ranges.profiler, name, getattr(profiler_ranges.profiler, name))
    noted = []
    follow_profilers(noted.append)
    with torch.profiler.profile():
        assert noted == [True], "profiles would not show the ops of GT"
    with torch.autograd.profiler.profile():
        pass
    assert noted == [True, False, True, False], "ops would be named after the end of a profile"


def test_a_range_is_recorded_under_its_name():
    with torch.profiler.profile() as profile, profiler_range("gt::x train.py:12"):
        torch.ones(3)
    assert "gt::x train.py:12" in [event.key for event in profile.key_averages()]
