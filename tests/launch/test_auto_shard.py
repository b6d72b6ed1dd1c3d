"""`gt.auto_shard`: recording a step, choosing its layouts, and using them."""

import contextlib
import itertools
import traceback

import numpy as np
import pytest
import torch

import gt
from gt.client.step_recorder import find_step_objects, record_steps
from gt.dispatcher.step_replay import replay_steps
from gt.launch import auto_shard
from gt.launch.auto_shard import parse_bytes
from gt.launch.plan_search import candidate_meshes
from gt.sharding.solver.recorded_program import program_of
from gt.sharding.solver.simple_solver import SimpleSolver
from gt.sharding.solver.strategy_graph import MergedModel, alike, build_graph
from gt.signals.document import model_text
from gt.signals.registry import registry
from gt.wire import long_waits
from tests.auto_shard_models import gt_step, handwritten, plain_model, training_step

SLOW_LINKS = gt.Calibration(flops=1e9, memory_bandwidth=1e9, op_seconds=1e-6, message_seconds=1e-6, link_bandwidth=1e8)


def start(workers=4, mode="shapes", hosts=()):
    gt.shutdown()
    gt.init(workers=workers, mode=mode, hosts=hosts)


@pytest.fixture(autouse=True)
def session():
    registry.clear()
    start()
    yield
    gt.shutdown()
    registry.clear()


def plan_of(name="mlp", **options):
    training = gt_step(name)
    return gt.auto_shard(training.step, *training.args, **{"mesh": "2x2", "seconds": 2.0, **options})


def recorded(step, *args):
    return record_steps(step, args, find_step_objects(step, args))


# Recording


def test_a_recorded_step_has_named_values_with_roles_and_modules():
    training = gt_step("mlp")
    program = program_of(recorded(training.step, *training.args))
    assert {*program.names} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {*program.gradients.values()} == {*program.names}
    assert {"0", "2", "1"} <= {op.module for op in program.ops}
    assert [boundary.module for boundary in program.boundaries if boundary.kind == "output"] == ["0", "1", "2", ""]
    assert [program.values[b.value].shape for b in program.boundaries if b.kind == "input"] == [(32, 64)]
    assert any(op.in_update for op in program.ops) and not program.ops[0].in_update
    versions = {program.kept[name] for name in program.names}
    assert len(versions) == 4 and versions.isdisjoint(program.names)


def test_writes_are_new_values_and_views_are_ops():
    model = gt.to(torch.nn.Linear(4, 4))

    def step(x):
        y = model(x)
        y[0] = 0
        y.mul_(2).sum().backward()

    program = program_of(recorded(step, gt.to(torch.ones(4, 4))))
    written = [op for op in program.ops if any(op.written)]
    assert len(written) >= 2
    names = [name for op in program.ops for name in op.outputs]
    assert len(names) == len(set(names))
    known = {*program.values} - {*names}
    for op in program.ops:
        assert known.issuperset(op.inputs)
        known.update(op.outputs)


def test_a_step_whose_shapes_depend_on_values_raises_with_its_line():
    start(mode="virtual")
    model = gt.to(torch.nn.Linear(4, 4))

    def step(x):
        y = model(x)
        y[y > 0].sum().backward()

    with pytest.raises(gt.SessionError, match=r"test_auto_shard.py:\d+: the result of aten.index.Tensor depends on"):
        gt.auto_shard(step, torch.ones(4, 4))


def test_a_step_may_end_with_its_model_and_a_module_may_raise():
    class Fragile(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.inner(x[:, :2])
            return self.inner(x)

    model = gt.to(Fragile())
    program = program_of(recorded(lambda x: model(x), gt.to(torch.ones(4, 4))))
    assert {op.module for op in program.ops if op.call.op == "aten.addmm.default"} == {"inner"}
    assert [boundary.kind for boundary in program.boundaries] == ["input", "output", "output"]


def test_a_step_that_reads_a_value_raises_with_its_line():
    training = gt_step("mlp")

    def step(batch):
        return training.step(batch).item()

    with pytest.raises(gt.SessionError, match=r"test_auto_shard.py:\d+: the value of a tensor of shape \[\] is read"):
        gt.auto_shard(step, *training.args)


def test_a_terminal_or_a_notebook_tells_how_far_planning_is(monkeypatch):
    texts = []

    class Display:
        show = staticmethod(texts.append)

        def clear(self):
            texts.append("")

    monkeypatch.setattr(auto_shard, "open_display", lambda is_wanted: Display() if is_wanted else None)
    monkeypatch.setattr(long_waits, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(long_waits, "REFRESH_SECONDS", 0.01)
    plan_of()
    assert all(text.startswith("gt: planning: ") for text in texts[:-1]) and texts[-1] == ""
    assert any("2x2: " in text for text in texts)
    texts.clear()
    monkeypatch.setenv("GT_PROGRESS", "0")
    plan_of()
    assert not texts


def test_lines_of_progress_go_to_a_function_if_one_is_given():
    lines = []
    plan_of(progress=lines.append)
    assert lines[0] == "recording the step" and any("variables" in line for line in lines)


def test_the_model_of_a_step_has_to_be_known():
    with pytest.raises(gt.SessionError, match="name it with model="):
        gt.auto_shard(lambda: None)
    unused = gt.to(torch.nn.Linear(2, 2))
    with pytest.raises(gt.SessionError, match="does not use the parameters of Linear"):
        gt.auto_shard(lambda: gt.ones(2) + 1, model=unused)
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(gt.SessionError, match=r"move it with gt.to\(model\)"):
        gt.auto_shard(lambda x: plain(x), torch.ones(2, 2))


# Choosing


def test_layers_that_are_alike_are_merged_without_loss():
    training = gt_step("gpt2", layers=6)
    program = program_of(recorded(training.step, *training.args))
    graph = build_graph(program, gt.mesh((4,), ("dp",)), gt.Calibration())
    merged = MergedModel(graph.model, alike(graph))
    assert len(merged.model.unary) < len(graph.model.unary) * 0.8
    one, other = [SimpleSolver("fast").solve(model) for model in (graph.model, merged.model)]
    assert other.cost == pytest.approx(graph.model.cost(merged.complete(other.chosen)))
    assert other.cost <= one.cost * 1.02


def wide_step(width=1024):
    """A step whose gradients fill a bucket each, so that backward goes on while they are reduced."""
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    model = gt.to(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, torch.empty(4096, width)


def test_reductions_of_gradients_overlap_with_backward_where_links_need_no_worker():
    step, x = wide_step()
    steps = recorded(step, x)
    mesh, data_parallel = gt.mesh((4,), ("dp",)), gt.ModelConfig({"dp": 4}, inputs=["dp", "..."])
    alone, both = [
        replay_steps(steps, data_parallel, mesh, 4, gt.Calibration(overlap=overlap)) for overlap in (0.0, 1.0)
    ]
    assert alone.nbytes == both.nbytes and alone.compute_seconds == pytest.approx(both.compute_seconds)
    assert [each.waits for each in alone.collectives] == pytest.approx([each.seconds for each in alone.collectives])
    *hidden, last = [each for each in both.collectives if each.kind == "all-reduce"]
    assert len(hidden) == 3 and all(each.waits < 0.1 * each.seconds for each in hidden)
    assert last.waits == pytest.approx(last.seconds, rel=0.1)  # the optimizer needs it at once
    assert both.seconds == pytest.approx(both.compute_seconds + sum(each.waits for each in both.collectives))


def test_gathers_of_weights_overlap_with_the_modules_before_them():
    step, x = wide_step()
    mesh, sizes = gt.mesh((4,), ("dp",)), {"dp": 4}
    cut = gt.ModelConfig(sizes, parameters={"*": ["dp", "-"]}, inputs=["dp", "..."], outputs={"*": ["dp", "..."]})
    steps = recorded(step, x)
    both = replay_steps(steps, cut, mesh, 4, gt.Calibration(overlap=1.0))
    gathers = [each for each in both.collectives if each.kind == "all-gather"]
    assert len(gathers) >= 4 and sum(each.waits < 0.1 * each.seconds for each in gathers) >= 3


def test_overlap_makes_data_parallel_plans_of_slow_links_worth_it():
    """Half of the time of the links is hidden behind backward."""
    step, x = wide_step()
    alone, both = [
        gt.auto_shard(step, x, mesh=4, seconds=2.0, machine=gt.Calibration(overlap=overlap)) for overlap in (0.0, 1.0)
    ]
    assert both.cost < alone.cost and both.gap < 0.05
    assert "100% overlap" in str(both) and "overlap" not in str(alone)


def test_a_plan_is_no_worse_than_those_of_people():
    plan = plan_of()
    for name, config in handwritten("mlp", plan.mesh).items():
        assert plan.cost <= plan.evaluate(config).seconds * (1 + 1e-9), name
    assert 0 <= plan.gap < 0.01


def test_little_memory_moves_it_from_whole_to_cut_weights():
    training = gt_step("mlp")
    batch = torch.randn(2048, 64)  # activations are larger than weights: the batch is cut
    machine = gt.Calibration(flops=1e9, message_seconds=1e-3, link_bandwidth=1e9)
    rich = gt.auto_shard(training.step, batch, mesh="1x4", seconds=2.0, machine=machine)
    assert not rich.config.parameters and rich.config.inputs == (("tp",), "...")
    limit = int(rich.memory * 0.93)
    poor = gt.auto_shard(training.step, batch, mesh="1x4", seconds=2.0, machine=machine, memory=limit)
    assert poor.memory <= limit and poor.cost >= rich.cost
    assert poor.config.inputs == rich.config.inputs
    assert any("weight" in entry.pattern and any(entry.dims) for entry in poor.config.parameters)


def test_a_limit_that_does_not_bind_changes_no_plan():
    free = plan_of("mlp")
    limited = plan_of("mlp", memory=free.memory)
    assert (limited.config, limited.cost, limited.gap) == (free.config, free.cost, free.gap)


def test_memory_that_nothing_fits_is_an_error():
    with pytest.raises(
        gt.LayoutError, match="holds at most 1,000 bytes; the smallest of those compared takes"
    ) as failure:
        plan_of(memory="1 KB", mesh=4)
    least = int(str(failure.value).partition("takes ")[2].partition(". ")[0].replace(",", ""))
    assert plan_of(memory=least, mesh=4, seconds=60.0).memory <= least
    with pytest.raises(gt.LayoutError):
        plan_of(memory=least // 2, mesh=4)


def test_layouts_of_the_user_are_kept():
    fixed = gt.ModelConfig({"dp": 2, "tp": 2}, parameters={"0.weight": ["-", "tp"]}, outputs={"0": ["dp", "-"]})
    plan = plan_of(constraints=fixed, mesh=None)
    assert plan.config.spec_for("0.weight").dims == ((), ("tp",))
    assert plan.config.output_for("0").dims == (("dp",), ())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"parameters": {"0.weight": ["-", "-", "tp"]}}, gt.SignalError, "names 3 dims, and 0.weight has the shape"),
        ({"parameters": {"0.weight": ["xp", "-"]}}, gt.SignalError, "axis 'xp' is not in the mesh"),
        ({"outputs": {"0": ["xp", "-"]}}, gt.SignalError, "axis 'xp' is not in the mesh"),
        ({"inputs": ["xp", "..."]}, gt.SignalError, "axis 'xp' is not in the mesh"),
    ],
)
def test_layouts_that_a_model_cannot_have_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        plan_of(constraints=gt.ModelConfig({"dp": 2, "tp": 2}, **options))


def test_a_tied_parameter_with_two_layouts_is_refused():
    layouts = {"transformer.wte.weight": ["dp", "-"], "lm_head.weight": ["-", "tp"]}
    fixed = gt.ModelConfig({"dp": 2, "tp": 2}, parameters=layouts)
    with pytest.raises(gt.SignalError, match="lay out one tied parameter in two ways"):
        plan_of("gpt2", constraints=fixed)


def test_a_layout_of_another_mesh_is_refused():
    with pytest.raises(gt.LayoutError, match="the given layouts are on the mesh {dp: 4}"):
        plan_of(constraints=gt.ModelConfig({"dp": 4}))


@pytest.mark.parametrize(
    ("mesh", "options", "error", "reason"),
    [
        ({"dp": 4}, {}, gt.LayoutError, "the given layouts are on the mesh {dp: 4}"),
        ({"dp": 2, "tp": 2}, {"parameters": {"0.weight": ["tp", "-", "-"]}}, gt.SignalError, "names 3 dims"),
    ],
)
def test_layouts_that_cannot_be_are_not_evaluated(mesh, options, error, reason):
    plan = plan_of()
    with pytest.raises(error, match=reason):
        plan.evaluate(gt.ModelConfig(mesh, **options))


def test_an_evaluated_layout_of_nothing_is_a_warning(caplog):
    plan_of().evaluate(gt.ModelConfig({"dp": 2, "tp": 2}, parameters={"0.wieght": ["dp", "-"]}))
    assert "'0.wieght' decides about no parameter; did you mean '0.weight'" in caplog.text


def test_constraints_that_are_no_layouts_are_refused():
    with pytest.raises(gt.SettingsError, match="are no layouts: give a gt.ModelConfig"):
        plan_of(constraints={"0.weight": ["tp", "-"]})


def test_a_fixed_layout_of_nothing_is_a_warning(caplog):
    plan_of(constraints=gt.ModelConfig({"dp": 2, "tp": 2}, parameters={"0.wieght": ["dp", "-"]}))
    assert "'0.wieght' decides about no parameter; did you mean '0.weight'" in caplog.text


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [("2xtwo", "'2xtwo' is no shape of a mesh"), ((2, 4), "needs 8 workers, and there are"), ("0x4", "0"), (-1, "-1")],
)
def test_a_mesh_that_cannot_be_is_refused_on_the_users_line(mesh, reason):
    with pytest.raises(gt.GTError, match=reason) as failure:
        plan_of(mesh=mesh)
    frames = traceback.extract_tb(failure.value.__traceback__)
    assert not [frame.name for frame in frames if "/gt/" in frame.filename]


def test_meshes_are_compared_if_none_is_given():
    plan = plan_of(mesh=None)
    assert {candidate.mesh.shape for candidate in plan.candidates} == {(1, 4), (2, 2)}
    assert [mesh.shape for mesh in candidate_meshes(dict.fromkeys(range(8), "here"))] == [(1, 8), (2, 4)]


def test_grids_with_exchanged_axes_are_compared_too_if_the_axes_differ():
    both = [(1, 4), (2, 2), (4, 1)]
    plan = plan_of(mesh=None, machine=gt.Calibration(axes={"dp": (1e-3, 1e8)}))
    assert sorted({candidate.mesh.shape for candidate in plan.candidates}) == both


def test_with_a_slow_link_between_hosts_tensor_parallel_is_within_and_data_parallel_between_them():
    start(hosts=["a", "b", "a", "b"])
    model = gt.to(torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    machine = gt.Calibration(flops=5e9, link_bandwidth=10e9, host_bandwidth=2e7)
    x = torch.ones(8192, 512)  # activations are larger than weights
    plan = gt.auto_shard(step, x, machine=machine)
    assert plan.mesh is gt.mesh((2, 2), ("dp", "tp")) and not plan.mesh.crosses_hosts("tp")
    assert plan.config.inputs == (("dp",), "...")
    assert plan.config.spec_for("0.weight").dims == (("tp",), ())
    assert plan.config.spec_for("2.weight").dims == ((), ("tp",))
    assert plan.config.workers is None  # another run, in which workers join in another order, has its own
    assert "workers:" not in plan.to_yaml() and "between hosts 0.02 GB/s" in str(plan)
    across = plan._search.evaluate(gt.mesh((2, 2), ("dp", "tp"), range(4)), plan.config, "across hosts")
    assert across.cost.seconds > plan.cost and across.cost.nbytes == plan.bytes
    named = gt.auto_shard(step, x, mesh=gt.mesh(4, ("w",), [3, 2, 1, 0]), method="fast", seconds=1.0)
    assert named.config.workers == (3, 2, 1, 0)


@pytest.mark.parametrize(("hosts", "shapes"), [("aaaa", [(1, 4), (2, 2)]), ("aabb", [(1, 4), (2, 2)])])
def test_grids_of_several_hosts(hosts, shapes):
    assert [mesh.shape for mesh in candidate_meshes(dict(enumerate(hosts)))] == shapes


def test_grids_with_exchanged_axes_differ_on_several_hosts():
    shapes = [mesh.shape for mesh in candidate_meshes(dict(enumerate("aaaabbbb")))]
    assert shapes == [(1, 8), (2, 4), (4, 2)]


def test_two_kinds_of_links_are_measured(tmp_path):
    start(mode="virtual", hosts=["a", "b", "a", "b"])
    measured = gt.calibrate(tmp_path / "speeds.json")
    assert measured.source == "measured on 4 workers of 2 hosts (cpu)"
    assert measured.host_bandwidth != gt.Calibration().host_bandwidth
    assert measured.link_bandwidth != gt.Calibration().link_bandwidth


# Using


@pytest.mark.parametrize("path", ["apply", "yaml"])
def test_predicted_bytes_are_the_counted_ones_and_losses_are_torchs(path, tmp_path):
    plan = plan_of(machine=SLOW_LINKS)
    text = plan.to_yaml(tmp_path / "plan.yaml")
    assert text == (tmp_path / "plan.yaml").read_text()
    start(mode="virtual")
    if path == "yaml":
        gt.load_config(tmp_path / "plan.yaml")
    ours, theirs = gt_step("mlp"), training_step(plain_model("mlp"), "mlp")
    if path == "apply":
        plan.apply(ours.model)
    for number in range(3):
        with gt.debug.comm() as c:
            loss = ours.step(*ours.args)
        torch.testing.assert_close(loss.cpu(), theirs.step(*theirs.args).detach())
        assert number == 0 or c.bytes == plan.bytes


@pytest.mark.parametrize("by", ["data parallel", "2-d", "fsdp"])
def test_predicted_bytes_are_the_counted_ones_on_several_hosts(by, tmp_path):
    hosts = ["a", "b", "a", "b"]
    start(hosts=hosts)
    plan = plan_of()
    config = handwritten("mlp", plan.mesh)[by]
    predicted = plan._search.evaluate(plan.mesh, config, by).cost
    start(mode="virtual", hosts=hosts)
    (tmp_path / "plan.yaml").write_text(model_text(config))
    gt.load_config(tmp_path / "plan.yaml")
    ours, theirs = gt_step("mlp"), training_step(plain_model("mlp"), "mlp")
    for number in range(3):
        with gt.debug.comm() as c:
            loss = ours.step(*ours.args)
        torch.testing.assert_close(loss.cpu(), theirs.step(*theirs.args).detach())
        assert number == 0 or c.bytes == predicted.nbytes
    if by == "data parallel":  # of the large weights
        kinds = [(each.kind, each.axes) for each in predicted.collectives]
        assert {("reduce-scatter", ("tp",)), ("all-reduce", ("dp",)), ("all-gather", ("tp",))} <= {*kinds}


def test_a_plan_applies_to_a_model_that_trains_already():
    start(mode="virtual")
    ours, theirs = gt_step("mlp"), training_step(plain_model("mlp"), "mlp")
    losses = [theirs.step(*theirs.args).item() for _ in range(5)]
    plan = gt.auto_shard(ours.step, *ours.args, mesh="2x2", seconds=2.0, machine=SLOW_LINKS)  # runs two steps
    plan.apply()
    for expected in losses[2:]:
        assert ours.step(*ours.args).item() == pytest.approx(expected, rel=1e-4)
    for name, parameter in ours.model.named_parameters():
        entry = plan.config.spec_for(name)
        assert parameter.spec.dims == (entry.dims if entry is not None else ((),) * parameter.dim())


# Reading a plan


def test_a_plan_prints_what_it_does_and_what_that_costs():
    plan = plan_of()
    text = str(plan)
    assert f"{plan.cost * 1e3:.3f} ms a step" in text and "gap 0.00%" in text
    assert "module" in text and "compared:" in text and "data parallel" in text
    assert "<table>" in plan._repr_html_()
    assert "ms a step" in repr(plan)


def test_a_loss_after_the_model_belongs_to_no_module():
    """Not to the one whose backward came last in the step before."""
    model = gt.to(torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 8)))

    def step(x):
        for part in x.chunk(2):
            torch.nn.functional.cross_entropy(model(part), part % 8).backward()

    fixed = gt.ModelConfig({"dp": 2, "tp": 2}, inputs=["dp"], outputs={"1": ["dp", "-"]})
    plan = gt.auto_shard(step, torch.arange(32), constraints=fixed)
    losses = [op for op in plan.program.ops if op.call.op == "aten.nll_loss_forward.default"]
    assert [op.module for op in losses] == ["", ""]
    cost = plan.evaluate(plan.config)
    assert {each.module for each in cost.collectives if "nll_loss" in each.op} == {""}


def test_an_explanation_has_the_alternatives_the_fastest_first():
    plan = plan_of()
    explanation = plan.explain("0.weight")
    times = [other.seconds for other in explanation.alternatives]
    assert len(times) == 8 and times == sorted(times)
    assert "0.weight is [" in str(explanation)
    assert plan.explain("1").name == "1"
    with pytest.raises(gt.SignalError, match="did you mean '0.weight'"):
        plan.explain("0.wieght")


def test_a_diff_names_the_layouts_that_differ():
    one = plan_of()
    other = plan_of(constraints=gt.ModelConfig({"dp": 2, "tp": 2}, parameters={"0.weight": [["dp", "tp"]]}))
    difference = one.diff(other)
    assert "0.weight" in difference and difference.count("ms a step") == 2
    assert one.diff(one).endswith("the layouts are the same")
    with pytest.raises(TypeError, match="not with a dict"):
        one.diff({})


def test_a_diff_compares_layouts_whatever_patterns_give_them():
    by_name, by_pattern = [
        plan_of(constraints=gt.ModelConfig({"dp": 2, "tp": 2}, parameters=parameters, outputs={"*": ["..."]}))
        for parameters in ({"0.weight": ["tp", "-"], "2.weight": ["-", "-"]}, {"*.weight": ["-", "-"]})
    ]
    rows = [line.split() for line in by_name.diff(by_pattern).splitlines()[2:]]
    assert [row for row in rows if "weight" in row[0]] == [["0.weight", "[tp,", "-]", "[-,", "-]"]]


def test_the_layouts_of_all_values_follow_by_propagation():
    plan = plan_of(constraints=gt.ModelConfig({"dp": 2, "tp": 2}, inputs=["dp", "..."]))
    cut = [value for value, layout in plan.propagation.layouts.items() if layout.axes]
    assert len(cut) > 10
    assert {*plan.program.names} <= {*plan.propagation.layouts}
    with pytest.raises(gt.LayoutError, match="no value '0.wieght'; did you mean '0.weight'"):
        plan.propagation.explain("0.wieght")


@pytest.mark.parametrize(
    ("text", "nbytes"), [(12, 12), (16e9, 16_000_000_000), ("1 KiB", 1024), ("1.5GB", 1_500_000_000), ("7", 7)]
)
def test_amounts_of_memory(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["16 apples", "1.2.3 GB", "-1 GB", "", b"1 GB", [1], 0, -5, float("nan"), float("inf")]
)
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(gt.SettingsError, match="is no amount of memory"):
        parse_bytes(text)


def test_a_calibration_is_measured_and_stored(tmp_path, monkeypatch):
    with pytest.raises(gt.SessionError, match="mode='shapes' has none"):
        gt.calibrate()
    start(workers=2, mode="virtual")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = gt.calibrate()
    file = tmp_path / "gt" / "calibration.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert measured.flops > 1e6 and measured.link_bandwidth > 1e3 and "2 workers" in measured.source
    assert np.isfinite([measured.op_seconds, measured.message_seconds]).all()


def test_tied_parameters_have_one_layout():
    training = gt_step("gpt2")
    steps = recorded(training.step, *training.args)
    program = program_of(steps)
    tied = [names for names in program.names.values() if len(names) > 1]
    assert tied == [("transformer.wte.weight", "lm_head.weight")]
    pairs = itertools.combinations(tied[0], 2)
    assert all(steps.parameters[one] == steps.parameters[other] for one, other in pairs)
