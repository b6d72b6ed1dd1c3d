"""`gt.explain`: what each line of a program did, and that no byte moves unseen."""

import io
import json
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gt
from tests.debug.explained_programs import PLANS, Model, check_bytes, explained, sharded, train

HERE = Path(__file__).name


def line_of(explanation, code):
    (found,) = [line for line in explanation.lines if line.code == code]
    return found


@pytest.fixture
def two_virtual():
    gt.init(workers=2, mode="virtual")
    yield
    gt.shutdown()


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_no_byte_moves_unseen_among_virtual_workers(tmp_path, two_virtual, plan):
    check_bytes(tmp_path, plan)


def test_one_worker_exchanges_nothing(embedded):
    explanation, comm = explained(lambda: train(gt.to(Model()), gt.ones(8, 8), gt.ones(8, 4)))
    assert explanation.bytes == comm.bytes == 0
    assert all(not line.collectives and list(line.worked_by_worker) in ([], [0]) for line in explanation.lines)


# --- Lines ------------------------------------------------------------------------------------------------------------


def test_a_line_has_its_ops_layouts_collectives_and_times(two_virtual):
    x, w = sharded("x, -"), sharded("-, x", (6, 4))
    with gt.explain(file=io.StringIO()) as explanation:
        y = (x @ w).relu()
    line = line_of(explanation, "y = (x @ w).relu()")
    assert Path(line.line.rpartition(":")[0]) == Path(__file__)
    assert line.ops == 2
    assert {"aten.mm.default", "aten.relu.default"} <= line.commands.keys()
    assert str(y.spec) in line.layouts[-1] and "on 0-1" in line.layouts[-1]
    assert line.changes
    (use,) = line.collectives
    assert (use.count, use.bytes) == (1, line.bytes)
    assert line.worked == sum(line.worked_by_worker.values()) > 0
    assert line.waited > 0


def test_an_op_counts_once_for_all_its_workers(two_virtual):
    x = sharded("x, -")
    with gt.explain(file=io.StringIO()) as explanation:
        for _ in range(30):
            x = x + 1.0
    line = line_of(explanation, "x = x + 1.0")
    assert (line.ops, line.commands) == (30, {"aten.add.Tensor": 30})


def test_whole_tensors_are_where_their_ops_ran(two_virtual):
    x = gt.replicate(torch.ones(3), gt.mesh(2, ("x",)))
    with gt.explain(file=io.StringIO()) as explanation:
        x.exp()
        gt.tensor([1.0]).sin()
    assert line_of(explanation, "x.exp()").layouts == ("replicated on 0-1",)
    assert line_of(explanation, "gt.tensor([1.0]).sin()").layouts[0].startswith("worker ")


def test_the_wait_of_a_read_belongs_to_its_line(anywhere):
    x = gt.ones(64, 64)
    with gt.explain(file=io.StringIO()) as explanation:
        y = x @ x
        y.sum().item()
        y.nonzero()
    assert line_of(explanation, "y.sum().item()").program_waited > 0
    assert line_of(explanation, "y.nonzero()").program_waited > 0
    assert line_of(explanation, "y = x @ x").program_waited == 0


def test_backward_belongs_to_the_line_that_calls_it(embedded):
    x = gt.ones(3, 3).requires_grad_()
    with gt.explain(file=io.StringIO()) as explanation:
        loss = (x @ x).sum()
        loss.backward()
    assert line_of(explanation, "loss = (x @ x).sum()").ops == 2
    assert line_of(explanation, "loss.backward()").ops >= 3


def test_only_what_happens_inside_is_explained(embedded):
    x = gt.ones(3).exp()
    with gt.explain(file=io.StringIO()) as explanation:
        x = x.sin()
    x.cos()
    assert {name for line in explanation.lines for name in line.commands if "." in name} == {"aten.sin.default"}


# --- Forms ------------------------------------------------------------------------------------------------------------


def test_a_table_is_printed_at_the_end_of_the_block(embedded, capsys):
    with gt.explain() as explanation:
        gt.ones(3).exp()
        assert capsys.readouterr().out == ""
    printed = capsys.readouterr().out
    assert printed == explanation.table() + "\n"
    header, *rows = printed.splitlines()
    assert header.split() == ["line", "code", "ops", "layouts", "collectives", "bytes", "workers", "waits", "reads"]
    assert [row for row in rows if row.startswith(f"{HERE}:") and "2: ones, exp" in row]
    assert rows[-1].startswith("all")


def test_a_terminal_gets_the_columns_that_are_used(embedded, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with gt.explain(file=terminal):
        gt.zeros(2, 2)[0].exp()
    assert f"{HERE}:" in terminal.getvalue() and "gt.zeros(2, 2)[0].exp()" in terminal.getvalue()
    assert "workers" in terminal.getvalue() and "collectives" not in terminal.getvalue()


def test_json_has_the_fields_of_the_lines(two_virtual):
    with gt.explain(file=io.StringIO()) as explanation:
        sharded("x, -").redistribute(placements="-, -")
    fields = json.loads(explanation.json())
    assert (fields["bytes"], fields["dropped"]) == (explanation.bytes, 0)
    (line,) = [line for line in fields["lines"] if line["bytes"]]
    assert line["collectives"] == [{"kind": "all-gather", "count": 1, "bytes": 96}]
    assert line["changes"] == [["[x, -] on 0-1", "replicated on 0-1"]]


def test_html_is_escaped(embedded):
    with gt.explain(file=io.StringIO()) as explanation:
        gt.ones(3).exp(), "<b>"
    html = explanation._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html


def test_lines_over_the_limit_are_counted(embedded):
    with gt.explain(file=io.StringIO(), limit=1) as explanation:
        gt.ones(3).exp()
        gt.ones(3).sin()
        gt.ones(3).cos()
    *_, total, note = explanation.table().splitlines()
    assert total.startswith("all") and " 6 " in total
    assert "lines not shown" in note and "limit=None shows all" in note
    assert len(explanation.lines) > 2


def test_lines_are_sorted_as_asked(two_virtual):
    with gt.explain(file=io.StringIO(), sort="bytes") as explanation:
        gt.ones(512, 512) @ gt.ones(512, 512)
        sharded("x, -").redistribute(placements="-, -")
    assert "redistribute" in explanation.table().splitlines()[1]


@pytest.mark.parametrize("options", [{"sort": "tyme"}, {"limit": 0}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="did you mean 'time'|is not possible"):
        gt.explain(**options)


# --- Together with others ---------------------------------------------------------------------------------------------


def test_explanations_nest(anywhere):
    with gt.explain(file=io.StringIO()) as outer:
        x = gt.ones(3).exp()
        with gt.explain(file=io.StringIO()) as inner:
            x.sin()
        x.cos()
    names = [{name for line in each.lines for name in line.commands} for each in (outer, inner)]
    assert names[0] >= {"aten.exp.default", "aten.sin.default", "aten.cos.default"}
    assert not names[1] & {"aten.exp.default", "aten.cos.default"}


def test_an_error_of_the_block_is_not_hidden(embedded, capsys):
    with pytest.raises(ZeroDivisionError), gt.explain():
        gt.ones(3)
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""
    with gt.explain() as explanation:
        gt.ones(3).exp()
    assert line_of(explanation, "gt.ones(3).exp()").ops == 2


def test_lines_of_notebook_cells_are_shown_with_their_code(embedded):
    cell = "import gt, io\nwith gt.explain(file=io.StringIO()) as found:\n    y = gt.ones(3).exp()"
    shell = InteractiveShell()
    shell.run_cell(cell).raise_error()
    [line] = [line for line in shell.user_ns["found"].lines if line.ops]
    assert (line.line, line.code) == ("In[1]:3", "y = gt.ones(3).exp()")
