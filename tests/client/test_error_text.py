"""Error messages: the operation, the reason and the remedy, on the user's line."""

import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gt
from gt.client.error_text import describe_departure
from gt.core.messages import Left, Lost
from tests.subprocesses import finish, start


def line():
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.ones(2, 3) @ m.ones(2, 3),
        lambda m: m.ones(2) + m.ones(3),
        lambda m: m.ones(2, 3).view(4),
        lambda m: m.ones(2, 3)[5],
        lambda m: m.ones(2, dtype=torch.int64) @ m.ones(2),
        lambda m: torch.cat([m.ones(2, 2), m.ones(3, 3)]),
        lambda m: m.ones(2).sum(dim=4),
        lambda m: torch.nn.functional.conv2d(m.ones(1, 2, 4, 4), m.ones(1, 3, 2, 2)),
        lambda m: m.ones(2).requires_grad_().add_(1),
        lambda m: m.arange(3).sqrt_(),
        lambda m: m.ones(2, 2).expand(3, 3),
        lambda m: torch.linalg.cholesky(-m.eye(2)),
        lambda m: torch.linalg.inv(m.zeros(2, 2)),
    ],
)
def test_shape_and_dtype_errors_are_torchs_and_at_once(anywhere, wrong):
    with pytest.raises(Exception) as expected:
        wrong(torch)
    with pytest.raises(type(expected.value)) as found:
        wrong(gt)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def failing():
    return gt.arange(3.0)[gt.tensor([7])]


def test_a_failure_in_a_worker_is_raised_at_the_read_with_the_users_line(anywhere):
    x = gt.arange(3.0)
    bad, where = x[gt.tensor([7])], line()
    with pytest.raises(gt.OpError) as found:
        bad.tolist()
    text = str(found.value)
    parts = [
        f'test_error_text.py", line {where}',
        "gt.arange",
        "aten.index.Tensor(float32[3], int64[1])",
        "out of bounds",
        "Traceback",
    ]
    places = [text.find(part) for part in (parts[0], *parts[2:])]
    assert -1 not in places
    assert places == sorted(places)
    assert "x[gt.tensor([7])]" in text


def test_a_failure_shows_the_shapes_of_views(embedded):
    with pytest.raises(gt.OpError, match=r"aten.index.Tensor\(float32\[2, 3\], int64\[1\]\)"):
        gt.arange(6.0).view(2, 3)[gt.tensor([7])].tolist()


def test_dtypes_that_gt_has_not_are_refused_at_once(embedded):
    with pytest.raises(TypeError, match="GT has no tensors of torch.quint8"):
        torch.quantize_per_tensor(gt.ones(2), 1.0, 0, torch.quint8)


def test_dependents_of_a_failure_fail_with_its_error_and_others_do_not(anywhere):
    good = gt.ones(1)
    bad = failing()
    dependent = (bad + good) * 2
    assert (good + 1).item() == 2
    for tensor in (bad, dependent):
        with pytest.raises(gt.OpError, match="out of bounds"):
            tensor.item()
    assert (good + 2).item() == 3


def test_a_failed_write_poisons_only_its_target(anywhere):
    x, y = gt.zeros(3), gt.zeros(3)
    x.index_add_(0, gt.tensor([9]), gt.ones(1))
    with pytest.raises(gt.OpError, match="index"):
        x.tolist()
    assert y.tolist() == [0.0, 0.0, 0.0]


def test_a_query_that_depends_on_a_failure_names_the_cause(anywhere):
    bad = failing()
    with pytest.raises(gt.OpError, match="out of bounds"):
        bad.nonzero()


def test_synchronize_raises_an_unread_failure(anywhere):
    failing()
    with pytest.raises(gt.OpError, match="out of bounds"):
        gt.synchronize()
    gt.synchronize()


def test_an_unread_failure_is_printed_at_shutdown(capsys):
    gt.init()
    failing()
    gt.shutdown()
    assert "never read" in capsys.readouterr().err


def test_failures_in_backward_tell_the_line_of_the_backward(anywhere):
    weight = gt.ones(3, 2, requires_grad=True)
    torch.nn.functional.embedding(gt.tensor([0, 9]), weight).sum().backward()
    with pytest.raises(gt.OpError, match=r"test_error_text.py"):
        weight.grad.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "at least 1, not 0"),
        ({"workers": "two"}, "not 'two'"),
        ({"workers": True}, "not True"),
        ({"mode": "virtul"}, "did you mean 'virtual'"),
        ({"backend": "pytorhc"}, "did you mean 'pytorch'"),
        ({"workers": 3, "mode": "embedded"}, "use mode='virtual'"),
        ({"mode": "connected"}, "GT_SERVER"),
        ({"server": "localhost"}, "host:port"),
        ({"server": "localhost:99999999"}, "host:port"),
        ({"server": "a server:1234"}, "the name or IPv4 address of a host"),
        ({"min_workers": 2}, "use workers="),
        ({"server": "localhost:1234", "min_workers": 0}, "at least 1"),
        ({"server": "localhost:1234", "workers": 2}, "not both"),
    ],
)
def test_wrong_arguments_to_init(arguments, message):
    with pytest.raises(gt.SettingsError, match=message):
        gt.init(**arguments)


def test_init_twice_and_late_gpu_workers(embedded):
    with pytest.raises(gt.SessionError, match="running already"):
        gt.init()
    with pytest.raises(gt.SessionError, match="before the first tensor"):
        gt.gpu_workers(2)


def test_gt_after_shutdown():
    gt.init()
    x = gt.ones(2)
    gt.shutdown()
    gt.shutdown()
    for use in (lambda: x + 1, lambda: x.tolist(), lambda: gt.ones(1), lambda: print(x), gt.synchronize):
        with pytest.raises(gt.SessionError, match=r"shut down.*gt.init\(\)"):
            use()
    gt.init()
    with pytest.raises(gt.SessionError, match="shut down"):
        x + gt.ones(2)
    assert gt.ones(2).tolist() == [1.0, 1.0]
    gt.shutdown()


def test_sparse_tensors_are_refused_with_a_reason(embedded):
    with pytest.raises(NotImplementedError, match="to_dense"):
        gt.to(torch.eye(2).to_sparse())


@pytest.fixture
def fresh_program(monkeypatch):
    """As if nothing had been started or shut down yet in this process."""
    monkeypatch.setattr("gt.launch.sessions._state.closed_because", "")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GT_WORKERS": "many"}, "GT_WORKERS='many' cannot be used"),
        ({"GT_WORKERS": "0"}, "at least 1"),
        ({"GT_BACKEND": "tensorflow"}, "GT_BACKEND='tensorflow' cannot be used: expected one of pytorch, numpy"),
        ({"GT_VERBOSE": "maybe"}, "GT_VERBOSE='maybe' cannot be used: expected 1 or 0"),
        ({"GT_SERVER": "nowhere"}, "host:port"),
        ({"GT_INSTRUCTION_LOG": "/nowhere/at/all.log"}, "cannot be written"),
    ],
)
def test_malformed_environment(fresh_program, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gt.SettingsError, match=message):
        gt.ones(1)


def test_an_unknown_variable_is_pointed_out():
    _, out, err = finish(start("-c", "import gt; print(gt.ones(1).item())", GT_WORKER="2"))
    assert out == "1.0\n"
    assert "GT_WORKER is not a setting of GT and is ignored; did you mean 'GT_WORKERS'?" in err


FORKED = """
import os, sys, gt
gt.init(**{mode})
x = gt.ones(2)
gt.synchronize()
child = os.fork()
if child == 0:
    for use in (x.tolist, lambda: x + 1, lambda: x.add_(1), lambda: gt.zeros(2), gt.synchronize):
        try:
            use()
        except gt.SessionError as error:
            assert "was forked" in str(error)
            print("refused", flush=True)
    sys.exit()
os.waitpid(child, 0)
print(x.add_(1).tolist(), gt.ones(1 << 20).sum().item())
"""


@pytest.mark.parametrize("mode", [{}, {"workers": 1}], ids=["embedded", "processes"])
def test_a_forked_child_gets_a_session_error(mode):
    _, out, err = finish(start("-c", FORKED.format(mode=mode)))
    assert out == "refused\n" * 5 + "[2.0, 2.0] 1048576.0\n", err


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_tensor_that_is_sent_to_another_process_is_refused(embedded, context):
    class Own(torch.Tensor):
        pass

    for tensor in (gt.ones(4, 2), torch.nn.Parameter(gt.ones(4, 2)), gt.ones(4, 2).as_subclass(Own)):
        loader = DataLoader(TensorDataset(tensor), num_workers=1, multiprocessing_context=context)
        with pytest.raises(gt.SessionError, match="cannot be sent to another process.*send tensor.cpu()"):
            list(loader)
    assert len(pickle.dumps(gt.ones(2))) > 0


DATA_LOADER = """
import gt
from torch.utils.data import DataLoader, TensorDataset
dataset = TensorDataset(gt.ones(4, 2))
try:
    list(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
except gt.SessionError as error:
    assert "was forked" in str(error) and "or use num_workers=0" in str(error)
    print(len(list(DataLoader(dataset))))
"""


def test_the_workers_of_a_data_loader_over_gt_tensors_are_told():
    _, out, err = finish(start("-c", DATA_LOADER))
    assert out == "4\n", err


PLAIN_DATA_LOADER = """
import io, numpy, torch, gt
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.from_numpy(numpy.full(2, index)), torch.tensor(index), torch.zeros(1)

with gt.device():
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=2):
        print(*[(type(tensor) is type(gt.ones(1)), tensor.tolist()) for tensor in batch])
    file = io.BytesIO()
    torch.save(torch.arange(6).view(2, 3).t(), file)
    file.seek(0)
    print(torch.load(file).tolist(), isinstance(torch.zeros(1), gt.Tensor))
"""


def test_the_workers_of_a_data_loader_make_plain_tensors_where_the_program_makes_gt_tensors():
    _, out, err = finish(start("-c", PLAIN_DATA_LOADER))
    batches = [
        f"(True, [[{n}, {n}], [{n + 1}, {n + 1}]]) (True, [{n}, {n + 1}]) (True, [[0.0], [0.0]])" for n in (0, 2)
    ]
    assert out.splitlines() == [*batches, "[[0, 3], [1, 4], [2, 5]] True"], err


@pytest.mark.parametrize("mode", [{}, {"workers": 2}], ids=["embedded", "processes"])
def test_an_unread_failure_is_printed_at_exit(mode):
    code = "import torch, gt; gt.init(**{}); y = torch.nn.functional.embedding(gt.tensor([7]), gt.ones(3, 2))"
    _, _, err = finish(start("-c", code.format(mode)))
    (line,) = err.splitlines()
    assert "aten.embedding.default failed and its result was never read: IndexError" in line
    assert "index out of range" in err


WRONG = {
    "sizes": lambda x: x.add_(torch.ones(5)),
    "a copy": lambda x: x.copy_(torch.ones(5)),
    "what is put": lambda x: x.__setitem__(torch.tensor([0, 1]), torch.ones(3, 4)),
    "what is added": lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2, 5), accumulate=True),
    "the dtype of an index": lambda x: x.scatter_(0, torch.zeros(2, 2), 1.0),
    "a dtype that does not fit": lambda x: x.copy_(torch.ones(3, 4)).bitwise_and_(1),
    "a truth value taken from": lambda x: 1 - (x > 0),
    "an order of complex numbers": lambda x: x.cfloat() < x.cfloat(),
    "a blend of whole numbers": lambda x: torch.lerp(x.long(), x.long(), 0.5),
    "a negative power": lambda x: x.long() ** -1,
    "the largest of nothing": lambda x: x[:0].max(),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_raises_at_once_and_leaves_its_arguments(anywhere, call):
    plain = torch.arange(12.0).reshape(3, 4)
    x = gt.to(plain)
    errors = []
    for tensor in (plain.clone(), x):
        with pytest.raises(Exception) as caught:
            WRONG[call](tensor)
        errors.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]
    assert x.tolist() in (plain.tolist(), [[1.0] * 4] * 3)


def test_truth_values_as_exponents(embedded):
    for exponent in (True, False):
        assert torch.equal((gt.ones(3) > 0) ** exponent, (torch.ones(3) > 0) ** exponent)


def test_a_mistake_of_gt_while_an_op_is_planned_is_the_failure_of_that_op(embedded, monkeypatch):
    a, b = gt.ones(3), gt.zeros(3)
    a.tolist(), b.tolist()

    def fail(*_):
        raise AssertionError("of a rule")

    with monkeypatch.context() as patch:
        patch.setattr("gt.dispatcher.plan_cache.plan_op", fail)
        bad = a.atan2(b)
        with pytest.raises(gt.OpError, match="failed before it reached a worker") as caught:
            (bad + 1).tolist()
    text = str(caught.value)
    assert "a mistake of GT" in text and "AssertionError: of a rule" in text and "aten.atan2.default" in text
    assert (a + b).tolist() == [1.0, 1.0, 1.0]


def test_a_tensor_of_a_failed_write_can_be_recovered(anywhere):
    model = gt.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    for index in (0, 7):  # the second step has no gradients
        optimizer.zero_grad()
        rows = gt.ones(3, 2)[gt.tensor([index])]
        model(rows).sum().backward()
        optimizer.step()
        if index == 0:
            weights = [parameter.detach().cpu() for parameter in model.parameters()]
    with pytest.raises(gt.OpError, match="out of bounds"):
        model.weight.tolist()
    gt.recover(model, optimizer)
    assert all(map(torch.equal, [parameter.detach().cpu() for parameter in model.parameters()], weights))
    optimizer.zero_grad()
    model(gt.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all().item()


def test_a_write_that_has_begun_cannot_be_taken_back(embedded):
    bad = gt.zeros(3)
    bad.index_add_(0, gt.tensor([9]), gt.ones(1))
    with pytest.raises(gt.RecoveryError):
        gt.recover(bad)


def test_a_result_of_a_failed_write_has_no_previous_value(anywhere):
    weight = gt.full((4,), 5.0)
    weight.sub_(gt.zeros(3)[gt.full((4,), 7)])
    for computed in (weight * 100, weight.int(), weight.sum(), weight.clone()):
        with pytest.raises(gt.RecoveryError, match="Load a checkpoint"):
            gt.recover(computed)
    gt.recover(weight)
    assert weight.tolist() == [5.0] * 4


def test_the_previous_value_of_a_sharded_tensor_is_gathered():
    gt.init(workers=2, mode="virtual")
    try:
        weight = gt.distribute(gt.full((4, 4), 5.0), gt.mesh((2,), ("d",)), "d, -")
        weight.sub_(gt.zeros(3, 4)[gt.full((4,), 7)])
        gt.recover(weight)
        assert weight.tolist() == [[5.0] * 4] * 4 and str(weight.spec) == "d, -"
    finally:
        gt.shutdown()


def test_recovery_keeps_strides_and_values_of_tensors_that_have_not_failed(anywhere):
    plain = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    tensor = gt.to(plain)
    tensor += 0
    stride = tensor.stride()
    gt.recover(tensor)
    assert torch.equal(tensor.cpu(), plain) and tensor.stride() == stride
    with pytest.raises(TypeError, match="not int"):
        gt.recover(3)


def test_a_worker_that_has_left_is_told_otherwise_than_one_that_leaves():
    reason = "was told to end"
    assert "worker 1 (pid 7) was told to end; its tensors move to other workers" in describe_departure(
        Left(1, 7, reason)
    )
    text = describe_departure(Lost(3, 1, 7, reason, ""), ("train.py", 4, "main"))
    assert "needed a worker that has left" in text and "makes no tensors any more" in text
    assert "move to" not in text
