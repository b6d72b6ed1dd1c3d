"""Programs of a server whose files, functions, scopes and meshes have names that a message cannot hold."""

import os

import pytest

import gt
from tests.slow_parameters import some_of
from tests.subprocesses import finish, running, serving, start

PROGRAM = """
import gt

def add(): return (gt.ones(3) + 1).sum().item()
add.__code__ = add.__code__.replace(co_name="a\\nb\\ud800")
for name in ("a\\nb", "\\ud800"):
    gt.register_config(name, gt.SignalConfig(compile=True))
with gt.signal.context("a\\nb"), gt.signal.context("\\ud800"):
    print(add())
"""


@pytest.mark.parametrize("name", some_of([b"new\nline", b"caf\xe9", b"bell\x07"], 3))
def test_a_program_with_an_odd_path_uses_a_server(tmp_path, name):
    folder = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(folder)
    path = os.fsdecode(os.path.join(folder, name + b".py"))
    with open(path, "w") as file:
        file.write(PROGRAM)
    with serving(1) as port:
        program = start(path, GT_SERVER=f"localhost:{port}")
        with running(program):
            code, out, err = finish(program)
    assert (code, out) == (0, "6.0\n"), err


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x" * 65])
def test_a_mesh_with_an_odd_name_is_refused(name):
    with pytest.raises(gt.LayoutError, match="cannot name a mesh"):
        gt.DeviceMesh((2,), ("x",), name=name)
    with pytest.raises(gt.LayoutError, match="cannot name a mesh axis"):
        gt.DeviceMesh((2,), (name,))
