"""Canaries for torch's private parts: each message says what breaks in GT where torch changes one."""

import threading

import pytest
import torch

from gt.worker.engines import torch_private as private

ISOLATION = (
    "PyTorchEngine.isolated(): modes, autocast and grad mode of the user's program would reach an embedded worker"
)


def test_all_ops_are_listed():
    names = private.registered_ops()
    assert {"aten::add.Tensor", "aten::relu"} <= set(names), "PyTorchEngine.resolve: no op would be allowed"


def test_an_overload_is_found_and_runs():
    add = private.find_overload("aten.add.Tensor")
    assert add(torch.ones(2), torch.ones(2)).tolist() == [2, 2], "PyTorchEngine.resolve: ops could not be run"


@pytest.mark.parametrize("op", ["add", "aten.add", "aten.add.Tensor.more"])
def test_a_name_of_another_form_is_in_no_registry(op):
    qualified, overload = private.qualified_name(op)
    assert f"{qualified}.{overload}" not in set(private.registered_ops())


def test_a_schema_tells_names_types_and_defaults_of_arguments():
    arguments = {argument.name: argument for argument in private.find_schema("aten.add.out").arguments}
    message = "checked_ops.py and schema_checks.py: arguments would not be checked, and could crash a worker"
    assert list(arguments) == ["self", "other", "alpha", "out"], message
    assert str(arguments["self"].real_type) == "Tensor", message
    assert arguments["alpha"].has_default_value() and arguments["alpha"].default_value == 1, message
    assert [name for name, argument in arguments.items() if argument.is_out] == ["out"], message
    (dtype,) = [a for a in private.find_schema("aten.zeros.default").arguments if a.name == "dtype"]
    assert str(dtype.real_type) == "Optional[ScalarType]", message


def test_the_python_function_of_an_op_runs_its_overload():
    named = private.find_python_function("aten.add.Tensor")
    assert named is not None, "PyTorchEngine.shortcut: ops would take half again as long"
    assert private.find_python_function("aten._no_such_op.default") is None
    assert named(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_a_watcher_sees_the_op_and_its_arguments():
    x = torch.ones(2)
    with private.OpWatcher() as watcher:
        torch.add(x, x)
    ((op, given),) = watcher.seen
    message = "PyTorchEngine.shortcut: a Python function that runs another overload would be used"
    assert op == "aten.add.Tensor" and all(each is x for each in given), message


def test_tensors_that_share_memory_have_one_storage():
    x = torch.ones(4)
    same = private.storage_identity(x) == private.storage_identity(x[1:]) != private.storage_identity(x.clone())
    assert same, "cleared_memory.py: memory that was written would be cleared, or foreign memory not"


def test_new_memory_is_filled_inside_and_the_setting_is_restored():
    before = torch.are_deterministic_algorithms_enabled()
    with private.new_memory_filled():
        inside = torch.empty(1000)
    assert inside.isnan().all(), "cleared_memory.py: a session could read what another one has left in memory"
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize(
    "surrounding",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.enable_grad,
        private.OpWatcher,
        lambda: torch.device("meta"),
    ],
    ids=["autocast", "grad mode", "a dispatch mode", "a device"],
)
def test_nothing_of_the_surrounding_program_is_seen_inside(surrounding):
    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with surrounding() as context, private.Isolation():
        made = torch.mm(x, w)
        new = torch.ones(2)
        is_inference = torch.is_inference_mode_enabled()
    assert (made.dtype, made.requires_grad, new.device.type) == (torch.float32, False, "cpu"), ISOLATION
    assert is_inference, ISOLATION
    assert not getattr(context, "seen", []), ISOLATION


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_trace_of_the_program_sees_nothing_inside():
    def function(x):
        with private.Isolation():
            assert type((torch.ones(2) * 3).shape[0]) is int, ISOLATION
        return x + 1

    nodes = [node.kind() for node in torch.jit.trace(function, torch.ones(2), check_trace=False).graph.nodes()]
    assert "aten::mul" not in nodes and "aten::add" in nodes, ISOLATION


def test_the_state_of_the_program_is_restored():
    with torch.autocast("cpu", torch.bfloat16):
        with private.Isolation():
            pass
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16, ISOLATION
    assert not torch.is_inference_mode_enabled(), ISOLATION


def test_other_threads_are_not_isolated():
    seen = []
    with private.Isolation():
        thread = threading.Thread(target=lambda: seen.append(torch.is_inference_mode_enabled()))
        thread.start()
        thread.join(10)
    assert seen == [False], ISOLATION
