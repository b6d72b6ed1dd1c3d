"""Tensors, meshes and layouts in notebooks: HTML that is escaped, and reads a few values only."""

from xml.etree import ElementTree

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import gt
from gt.sharding.spec import DeviceMesh


@pytest.fixture
def mesh():
    gt.init(workers=4, mode="virtual")
    yield gt.mesh((2, 2), ("dp", "tp"))
    gt.shutdown()


def parse(html):
    return ElementTree.fromstring(f"<div>{html}</div>")


def cells(root):
    return [[cell.text or "" for cell in row] for row in root.iter("tr")]


def test_a_tensor_shows_its_layout_its_parts_and_its_values(mesh):
    root = parse(gt.distribute(torch.ones(6, 4), mesh, "dp, -")._repr_html_())
    assert root.find("table/caption").text == "gt.Tensor of torch.float32, 6x4 as [dp, -] on mesh (dp=2, tp=2)"
    assert cells(root)[1] == ["0", "dp=0 tp=0", "[0:3, 0:4]", "3x4", "48 B", "-"] and len(cells(root)) == 5
    assert root.find("pre").text.startswith("all values:\n[[1., 1., 1., 1.],")


@pytest.mark.parametrize(
    ("shape", "which"),
    [
        ((), "all values"),
        ((0, 3), "all values"),
        ((100,), "values [0:6] of 100"),
        ((8, 100, 3), "values [0, 0:6, 0:3] of 2400"),
    ],
)
def test_of_a_large_tensor_a_few_values_are_read(mesh, shape, which):
    x = gt.ones(*shape, requires_grad=True) if shape else gt.ones((), requires_grad=True)
    with gt.debug.timeline() as timeline:
        root = parse(x._repr_html_())
    assert root.find("pre").text.startswith(f"{which}:\n") and "requires_grad" in root.find("table/caption").text
    assert sum(event.op == "fetch" for event in timeline.events) <= 4


def test_a_tensor_that_has_failed_says_why_and_raises_nothing(mesh):
    failed = gt.tensor([1.0, 2.0])[torch.tensor([9])]
    first, file, source, op, error = parse(failed._repr_html_()).find("pre").text.splitlines()
    assert first == "gt.Tensor(no value, shape=(1,), dtype=torch.float32)"
    assert "test_printing.py" in file and "torch.tensor([9])" in source and "aten.index.Tensor" in op
    assert error.strip().startswith("IndexError: index 9 is out of bounds")


def test_a_tensor_of_a_session_that_has_ended_has_no_value_either(mesh):
    x = gt.ones(2, 2)
    gt.shutdown()
    assert "GT was shut down" in parse(x._repr_html_()).find("pre").text


@pytest.mark.parametrize(
    ("mesh", "grids"),
    [
        (DeviceMesh([2], ["b"]), [[["", "b=0", "b=1"], ["", "worker 0", "worker 1"]]]),
        (
            DeviceMesh([2, 2], ["dp", "tp"], [3, 2, 1, 0]),
            [[["", "tp=0", "tp=1"], ["dp=0", "worker 3", "worker 2"], ["dp=1", "worker 1", "worker 0"]]],
        ),
    ],
)
def test_a_mesh_is_a_grid_of_workers(mesh, grids):
    root = parse(mesh._repr_html_())
    assert [cells(table) for table in root.iter("table")] == grids


def test_a_mesh_of_three_axes_is_several_grids_and_a_large_one_is_text():
    assert [table.find("caption").text for table in parse(DeviceMesh([2, 2, 2])._repr_html_()).iter("table")] == [
        "mesh (axis0=2, axis1=2, axis2=2), axis0=0",
        "mesh (axis0=2, axis1=2, axis2=2), axis0=1",
    ]
    assert parse(DeviceMesh([1000])._repr_html_()).find("pre").text == "mesh (axis0=1000)"


def test_a_layout_shows_the_axes_of_each_dim(mesh):
    spec = (gt.distribute(torch.ones(6, 4), mesh, "dp, tp") @ gt.distribute(torch.ones(4, 4), mesh, "tp, -")).spec
    assert cells(parse(spec._repr_html_())) == [
        ["dim", "cut along", "parts"],
        ["0", "dp", "2"],
        ["1", "-", "1"],
        ["all", "partial along tp: to be reduced by sum", ""],
    ]


def test_a_signal_shows_its_keys_escaped():
    root = parse(gt.SignalConfig(backward_signal="a<b>&c")._repr_html_())
    assert ["backward_signal", "'a<b>&c'"] in cells(root)


NOTEBOOK = [
    "import torch, gt\ngt.init(workers=2, mode='virtual')\n"
    "x = gt.ones(6, 4, mesh=gt.mesh(2, ('w',)), placements=[gt.Shard(0)])\nx",
    "gt.mesh(2)",
    "x[:, torch.tensor([9])]",
    "from gt.monitor.progress import open_display\nfrom gt.wire.long_waits import LongWait\n"
    "display = open_display(True)\nfor text in ('gt: one', 'gt: two'):\n    display.show(text)\n"
    "print(type(display).__name__)",
    "display.show('gt: three')\ndisplay.clear()",
]


@pytest.mark.slow
def test_a_real_kernel_shows_tensors_meshes_and_progress():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in NOTEBOOK])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    tensor, mesh, failed, progress, cleared = [cell.outputs for cell in notebook.cells]
    assert "6x4 as [w, -] on mesh (w=2)" in tensor[-1].data["text/html"]
    assert tensor[-1].data["text/plain"].startswith("gt.Tensor(")
    assert "<td>worker 1</td>" in mesh[0].data["text/html"]
    (shown,) = [output for output in failed if output.output_type == "execute_result"]
    assert "no value" in shown.data["text/html"] and "no value" in shown.data["text/plain"]
    assert "Traceback" not in str(failed)
    texts = [output.data["text/plain"] for output in progress if output.output_type == "display_data"]
    assert texts == ["gt: two"] and any(output.get("text") == "NotebookDisplay\n" for output in progress)
    assert [output.data["text/plain"] for output in cleared] == [""]
