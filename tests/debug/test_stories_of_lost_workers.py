"""`gt.debug.story` after a worker was killed: the ops that it took part in are still told."""

import os
import signal

import pytest
import torch

import gt
from gt.client import active_session
from tests.debug.test_stories import told


def test_a_story_keeps_what_was_before_a_worker_was_lost():
    gt.init(workers=2)
    try:
        mesh = gt.mesh(2, ("x",))
        w = gt.distribute(torch.ones(4, 4), mesh, "x, -")
        w @ w
        w += 1
        before = told(gt.debug.story(w))
        assert [kind for kind, _ in before[:4]] == ["uploaded", "copied", "used", "used"]
        gt.synchronize()
        os.kill(active_session.current().welcome.workers[1].pid, signal.SIGKILL)
        with pytest.raises(gt.WorkerLost):
            w.sum().item()
        story = gt.debug.story(w)
        assert told(story)[: len(before)] == before
        assert story.missing == "worker 1 was lost"
    finally:
        gt.shutdown()
