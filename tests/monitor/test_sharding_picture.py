"""Pictures of layouts: tables, HTML and files show which worker holds which part."""

from importlib.util import find_spec
from xml.etree import ElementTree

import pytest
import torch

import gt
from gt.core.errors import SettingsError
from gt.monitor.sharding_picture import ShardingPicture
from gt.sharding.held_parts import HeldPart


@pytest.fixture
def mesh():
    gt.init(workers=4, mode="virtual")
    yield gt.mesh((2, 2), ("dp", "tp"))
    gt.shutdown()


def held(picture):
    return [(part.worker, part.coordinate, part.slice, part.shape, part.nbytes, part.partial) for part in picture.parts]


def test_parts_have_slices_shapes_bytes_and_replicas_one_colour(mesh, capsys):
    picture = gt.visualize_sharding(gt.distribute(torch.ones(7, 4), mesh, "dp, -"))
    assert held(picture) == [
        (0, "dp=0 tp=0", "[0:4, 0:4]", "4x4", 64, ""),
        (1, "dp=0 tp=1", "[0:4, 0:4]", "4x4", 64, ""),
        (2, "dp=1 tp=0", "[4:7, 0:4]", "3x4", 48, ""),
        (3, "dp=1 tp=1", "[4:7, 0:4]", "3x4", 48, ""),
    ]
    first, second, third, fourth = [part.colour for part in picture.parts]
    assert first == second != third == fourth
    shown = capsys.readouterr().out
    assert "7x4 as [dp, -] on mesh (dp=2, tp=2)" in shown and "[4:7, 0:4]" in shown


def test_the_grid_of_the_mesh_is_drawn_if_it_fits(mesh):
    picture = gt.visualize_sharding(gt.distribute(torch.ones(7, 4), mesh, "dp, tp"))
    rows = [line for line in picture.text().splitlines() if "worker" in line]
    assert ["".join(row.split("│")).split() for row in rows] == [["worker", n, "worker", m] for n, m in ("01", "23")]
    assert "worker 0" not in picture.text(width=20), "a list, with the word in its head"


def test_a_mesh_and_a_plain_tensor_have_pictures(mesh, tmp_path):
    picture = gt.visualize_sharding(mesh)
    assert "mesh (dp=2, tp=2)" in picture.text() and "dp=1 tp=0" in picture.text() and "[" not in picture.text()
    picture.save(tmp_path / "mesh.svg")
    assert "worker 3" in (tmp_path / "mesh.svg").read_text()
    plain = gt.visualize_sharding(torch.ones(2, 3)).text()
    assert "2x3, a plain tensor" in plain and "this process" in plain and "24 B" in plain
    with pytest.raises(gt.LayoutError, match="a tensor or a mesh, not list"):
        gt.visualize_sharding([1])


def test_partial_values_are_marked_and_are_no_replicas(mesh):
    left, right = gt.distribute(torch.ones(6, 4), mesh, "-, tp"), gt.distribute(torch.ones(4, 4), mesh, "tp, -")
    picture = gt.visualize_sharding(left @ right)
    assert {part.partial for part in picture.parts} == {"tp"}
    first, second, third, _ = [part.colour for part in picture.parts]
    assert first != second and first == third


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_any_shape_has_a_picture(mesh, shape, tmp_path):
    picture = gt.visualize_sharding(gt.ones(*shape) if shape else gt.ones(()))
    picture.save(tmp_path / "x.svg")
    ElementTree.parse(tmp_path / "x.svg")


def test_files_and_html_are_well_formed_and_escaped(mesh, tmp_path):
    part = HeldPart(0, "<b>", 0, ((0, 2),), 8, "<i>")
    picture = ShardingPicture("<script>", (2,), [part])
    root = ElementTree.fromstring(picture._repr_html_())
    assert root.find("caption").text == "<script>" and [cell.text for cell in root.iter("td")][1] == "<b>"
    assert ElementTree.fromstring(picture.svg()).tag.endswith("svg")
    assert "[bold]" in ShardingPicture("[bold]", (2,), [part]).text(), "no markup"
    with pytest.raises(SettingsError, match=r"suffix .svg or .png, not to 'x.jpg'"):
        picture.save(tmp_path / "x.jpg")


def test_a_png_is_drawn_or_the_error_says_what_to_install(mesh, tmp_path):
    picture = gt.visualize_sharding(gt.distribute(torch.ones(4, 4), mesh, "dp, tp"))
    if find_spec("matplotlib") is None:
        with pytest.raises(SettingsError, match=r"a PNG needs matplotlib: pip install 'gt-tensor\[pictures\]'"):
            picture.save(tmp_path / "x.png")
        return
    picture.save(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_html_and_no_table(mesh, monkeypatch, capsys):
    class ZMQInteractiveShell:
        pass

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    picture = gt.visualize_sharding(gt.ones(3))
    assert capsys.readouterr().out == "" and picture._repr_html_().startswith("<table>")
