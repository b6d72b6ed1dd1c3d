"""Only state.py, tensor_tables.py and tensor_losses.py change the dispatcher's state, read from the source."""

import ast
from pathlib import Path

import pytest

import gt.dispatcher

FOLDER = Path(gt.dispatcher.__file__).parent
WRITERS = {"state.py", "tensor_tables.py", "tensor_losses.py", "undo_log.py"}
ROOTS = ("state", "self.state", "self._state", "self.dispatcher.state", "session", "worker", "record", "op")
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def chain(node):
    """`self._state.tensors[x].spec` as `self._state.tensors.spec`; empty for anything but attributes and items."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return chain(node.value)
    if isinstance(node, ast.Attribute):
        inner = chain(node.value)
        return inner and f"{inner}.{node.attr}"
    return ""


def is_table(node, aliases):
    """Whether an expression is a part of the state: a field of it, or a local name for one."""
    path = chain(node)
    return path.split(".")[0] in aliases or any(path.startswith(f"{root}.") for root in ROOTS)


def aliases_in(function):
    """Local names that are assigned a part of the state, as in `tensors = state.tensors`."""
    pairs = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
    return {name.id for name, value in pairs if isinstance(name, ast.Name) and is_table(value, ())}


def writes_in(source):
    """The lines of a source that change the state."""
    lines = set()
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        aliases = aliases_in(function)
        for node in ast.walk(function):
            targets = getattr(node, "targets", []) or [getattr(node, "target", None)]
            stored = [t for t in targets if isinstance(t, ast.Attribute | ast.Subscript)]
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete) and any(is_table(t, aliases) for t in stored):
                lines.add(node.lineno)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value
                is_undo = chain(value).endswith(".undo")
                if is_undo or (node.func.attr in MUTATORS and is_table(value, aliases)):
                    lines.add(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    "statement",
    [
        "state.tensors[1] = 2",
        "self._state.pending[request].mesh = None",
        "session.watches = True",
        "del self.state.copies[ident]",
        "state.workers_joined += 1",
        "self._state.undo.put(table, 1, 2)",
        "self._state.tensors.pop(ident)",
        "worker.known_ops.add(op_id)",
        "tensors, other = state.tensors, 1; tensors[1] = 2",
        "sessions = self._state.sessions; sessions.clear()",
    ],
)
def test_a_write_is_found(statement):
    assert writes_in(f"def f():\n    {statement}") == [2]


@pytest.mark.parametrize(
    "statement",
    ["self._state.add_tensor(1, 2)", "state.remove(1)", "tensors = state.tensors; x = tensors[1]", "found.pop(1)"],
)
def test_a_call_of_the_state_and_a_read_are_no_writes(statement):
    assert writes_in(f"def f():\n    {statement}") == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_only_the_state_changes_itself(path):
    assert path.name in WRITERS or writes_in(path.read_text()) == []
