"""Tracebacks that users read, and the failures printed at the end of a program that has not read them."""

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gt
from tests.subprocesses import finish, start

WRONG: dict[str, Callable[[], object]] = {
    "shape": lambda: gt.ones(4).reshape(5, 5),
    "operator": lambda: gt.ones(4) @ gt.ones(3),
    "creation": lambda: gt.zeros(-1),
    "module": lambda: gt.nn.Linear(-1, 2),
    "read": lambda: gt.ones(2, requires_grad=True).numpy(),
    "index": lambda: gt.ones(2).__setitem__(9, 1),
    "mesh": lambda: gt.mesh(9),
    "move": lambda: gt.to(3),
    "number": lambda: float(gt.ones(2)),
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), gt.ones(3, 3)),
    "format": lambda: f"{gt.ones(()):q}",
}


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("name", WRONG)
def test_a_traceback_ends_on_the_users_line(embedded: None, name: str) -> None:
    with pytest.raises(Exception) as raised:
        WRONG[name]()
    assert set(frames(raised.value)) == {__file__}
    assert raised.value.__context__ is None


def test_a_failure_that_is_read_later_ends_on_the_line_that_reads(embedded: None) -> None:
    failed = gt.ones(3)[gt.tensor(7) * torch.ones(1, dtype=torch.int64)]
    for read in (failed.cpu, failed.tolist, failed.__repr__):
        with pytest.raises(gt.OpError) as raised:
            read()
        assert set(frames(raised.value)) == {__file__}


def test_frames_of_torch_above_the_op_stay(embedded: None) -> None:
    with pytest.raises(RuntimeError) as raised:
        gt.nn.Linear(3, 3)(gt.ones(4))
    files = frames(raised.value)
    assert any(file.endswith("linear.py") for file in files)
    assert not any("gt/client" in file for file in files)


def test_the_error_that_a_program_was_handling_stays_the_context(embedded: None) -> None:
    with pytest.raises(RuntimeError) as raised:
        try:
            raise KeyError("of the program")
        except KeyError:
            gt.ones(4).reshape(5, 5)
    assert isinstance(raised.value.__context__, KeyError)


def test_full_tracebacks_are_shown_on_request(embedded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_FULL_TRACEBACK", "1")
    with pytest.raises(RuntimeError) as raised:
        gt.ones(4).reshape(5, 5)
    assert any("gt/client/torch_dispatch.py" in file for file in frames(raised.value))


UNREAD = """
import torch, gt
x = gt.ones(3)
y = x[gt.tensor([7])]
"""


def test_a_failure_that_is_never_read_is_one_line_at_the_end(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(UNREAD)
    _, _, told = finish(start(str(program)))
    (line,) = told.splitlines()
    assert line == (
        f"gt: {program}:4: aten.index.Tensor failed and its result was never read: "
        "IndexError: index 7 is out of bounds for dimension 0 with size 3"
    )


@pytest.mark.parametrize(
    "work",
    [
        lambda: gt.load_config("no_such_file.yaml"),
        lambda: gt.register_config("forward", None),
        lambda: gt.ShardConfig(axis=0, replicate=True),
        lambda: gt.SignalConfig(compile="yes"),
        lambda: gt.ModelConfig({"dp": 2}, parameters={"*": ["tp"]}),
        lambda: gt.signal.context(3).__enter__(),
        lambda: gt.signal.exit("forward"),
    ],
)
def test_mistakes_in_configurations_end_on_the_users_line(work):
    with pytest.raises(gt.SignalError) as raised:
        work()
    assert raised.traceback[-1].path == Path(__file__)


@pytest.mark.parametrize(
    ("work", "kind"), [(lambda: gt.Calibration(flops=0), ValueError), (lambda: gt.no_such_name, AttributeError)]
)
def test_mistakes_in_other_calls_end_on_the_users_line(work, kind):
    with pytest.raises(kind) as raised:
        work()
    assert raised.traceback[-1].path == Path(__file__)
