"""`gt.debug.story`: every event of one tensor, in the order of the program."""

from pathlib import Path

import pytest
import torch

import gt
from gt.dispatcher import tensor_stories

HERE = Path(__file__)


def told(story):
    return [(event.kind, event.op) for event in story.events]


def code_of(event):
    file, _, line = event.line.rpartition(":")
    assert Path(file) == HERE
    return HERE.read_text().splitlines()[int(line) - 1].strip()


def test_a_story_has_creation_copies_writes_uses_reads_and_frees_of_copies():
    gt.init(workers=2, mode="virtual")
    try:
        mesh = gt.mesh(2, ("x",))
        w = gt.ones(4, 4, mesh=mesh, placements="x, -")
        x = gt.distribute(torch.ones(4, 4), mesh, "x, -")
        y = x @ w
        w += 1
        w.tolist()
        story = gt.debug.story(w)
        assert told(story) == [
            ("created", "aten.ones.default"),
            ("copied", "aten.mm.default"),
            ("used", "aten.mm.default"),
            ("written", "aten.add_.Tensor"),
            ("copy freed", ""),
            ("read", ""),
        ]
        created, copied, used, written, freed, read = story.events
        assert (created.layout, created.workers) == ("[x, -] on 0-1", (0, 1))
        assert code_of(copied) == code_of(used) == "y = x @ w"
        assert (copied.layout, copied.result, used.tensor) == ("replicated on 0-1", freed.tensor, freed.tensor)
        assert (written.tensor, code_of(written)) == (created.tensor, "w += 1")
        assert (written.result, code_of(read), read.workers) == (read.tensor, "w.tolist()", (0, 1))
        assert story.is_complete and (story.layout, story.copies, story.missing) == ("[x, -] on 0-1", (), "")
        assert gt.debug.story(x).events[0].kind == "uploaded"
        assert gt.debug.story(y).copies == ()
        assert "test_stories.py" in str(story) and str(story).splitlines()[0].endswith("now [x, -] on 0-1")
    finally:
        gt.shutdown()


def test_a_read_of_the_worker_in_this_process_is_told_in_its_place(embedded):
    x = gt.ones(3)
    x.exp()
    x.sum().item()
    x.tolist()
    x.sin()
    kinds = [event.kind for event in gt.debug.story(x).events]
    assert kinds == ["created", "used", "used", "read", "used"]


def test_ops_of_segments_are_told_one_by_one(anywhere):
    x, y = gt.ones(4), gt.ones(4)
    for _ in range(50):
        for _ in range(3):
            y = (y * 0.5).relu() + x
        x.mul_(0.5)
    assert gt.debug.get_worker_stats().hot_paths.hits > 0
    story = gt.debug.story(x)
    kinds = [event.kind for event in story.events]
    assert (kinds.count("used"), kinds.count("written")) == (150, 50)


def test_old_events_are_cut_off_and_the_story_says_so(embedded, monkeypatch):
    monkeypatch.setattr(tensor_stories, "KEPT", 20)
    x = gt.ones(3)
    for size in range(40):
        gt.ones(size).sum().item()
    x.sin()
    story = gt.debug.story(x)
    assert told(story) == [("used", "aten.sin.default")]
    assert not story.is_complete and "is not kept" in str(story)


def test_a_query_and_a_view_have_stories(embedded):
    x = gt.tensor([0.0, 1.0, 2.0])
    found = x.nonzero()
    assert told(gt.debug.story(found))[0] == ("created", "aten.nonzero.default")
    assert told(gt.debug.story(x[1:])) == told(gt.debug.story(x))


def test_a_lost_tensor_says_why_it_has_no_value(embedded):
    x = gt.arange(3.0)[gt.tensor([7])]
    story = gt.debug.story(x)
    assert story.events[-1].op == "aten.index.Tensor"
    with pytest.raises(gt.OpError):
        x.sum().item()


def test_a_failed_tensor_and_those_made_of_it_say_why(anywhere):
    x = gt.ones(3, 3).index_select(0, gt.tensor([7]))
    y = x.exp()
    with pytest.raises(gt.OpError):
        y.sum().item()
    for tensor in (x, y):
        assert gt.debug.story(tensor).missing.startswith("aten.index_select.default failed (")
        assert "test_stories.py:" in gt.debug.story(tensor).missing
    assert gt.debug.story(gt.ones(2)).missing == ""


def test_other_things_have_no_story(embedded):
    with pytest.raises(TypeError, match="takes a GT tensor, not Tensor"):
        gt.debug.story(torch.ones(3))
