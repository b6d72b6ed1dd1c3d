"""Ops whose kernels would write outside of memory are refused before the call, as errors of that op alone."""

import contextlib
import types

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gt
from gt.core.signatures import DType, Input, MemoryFormat
from gt.worker.engines import PyTorchEngine
from gt.worker.engines.checked_ops import CHECKS
from tests.crash_detector.recording import all_ops, schema_of

aten = torch.ops.aten
FAR = 1 << 33  # an index of no mapped memory
MOST = (1 << 63) - 1  # twice this is -2


def full(value, *shape):
    return torch.full(shape, value)


def ones(*shape):
    return torch.ones(shape)


LISTS = [ones(3, 4)]
WRONG = {
    "_convert_indices_from_coo_to_csr": ((full(FAR, 4), 3), "self has values from 8589934592 to 8589934592"),
    "_convert_indices_from_csr_to_coo": ((full(FAR, 4), full(0, 3)), "not an op that this worker may run"),
    "max_pool2d_with_indices_backward": (
        (ones(1, 2, 2, 2), ones(1, 2, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, full(FAR, 1, 2, 2, 2)),
        "indices has values from 8589934592 to 8589934592, out of range: they must be from 0 to 15",
    ),
    "max_pool3d_with_indices_backward": (
        (ones(1, 1, 1, 1, 1), ones(1, 1, 2, 2, 2), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, full(-1, 1, 1, 1, 1, 1)),
        "indices has values from -1 to -1",
    ),
    "adaptive_max_pool2d_backward": ((ones(2, 2, 2), ones(2, 4, 4), full(FAR, 2, 2, 2)), "indices has values"),
    "adaptive_max_pool3d_backward": ((ones(2, 2, 2, 2), ones(2, 4, 4, 4), full(FAR, 2, 2, 2, 2)), "indices has values"),
    "fractional_max_pool2d_backward": (
        (ones(2, 2, 2), ones(2, 4, 4), [2, 2], [2, 2], full(FAR, 2, 2, 2)),
        "indices has values",
    ),
    "_ctc_loss": ((ones(6, 2, 5), full(FAR, 2, 3), [6, 6], [3, 2]), "targets has values"),
    "_ctc_loss_backward": (
        (ones(2), ones(6, 2, 5), full(1, 2, 3), [6, 6], [3, 2], ones(2), ones(2, 6, 3), 0),
        "log_alpha has shape [2, 6, 3], but must have [2, 6, 7]",
    ),
    "nll_loss_backward": ((ones(2), ones(2, 3), full(FAR, 2), None, 0, -100, ones(1).sum()), "target has values"),
    "native_batch_norm": ((ones(4, 6, 5), ones(2), None, None, None, True, 0.1, 1e-5), "weight has shape [2]"),
    "native_batch_norm_backward": (
        (ones(4, 6), ones(4, 6), ones(2), None, None, ones(6), ones(6), True, 1e-5, [True, True, True]),
        "weight has shape [2]",
    ),
    "native_layer_norm_backward": (
        (ones(4, 6), ones(4, 6), [6], ones(1, 1), ones(1, 1), None, None, [True, True, True]),
        "mean has shape [1, 1]",
    ),
    "native_group_norm": ((ones(2, 6, 3), ones(2), None, 2, 6, 3, 2, 1e-5), "weight has shape [2]"),
    "_fused_adam": (
        (LISTS, [ones(2)], LISTS, LISTS, [], [ones(1)]),
        {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False},
        "grads has",
    ),
    "_softmax_backward_data": ((ones(9, 3), ones(2, 3), 1, torch.float32), "grad_output has shapes [9, 3]"),
    "_scaled_dot_product_flash_attention_for_cpu": (
        (ones(8, 2, 3, 8), ones(2, 2, 3, 8), ones(2, 2, 3, 8)),
        "key has shape [2, 2, 3, 8], which does not fit (B, G, S, E)",
    ),
    "_segment_reduce_backward": (
        (ones(2), ones(2), ones(5), "max"),
        {"lengths": full(FAR, 2)},
        "out of range",
    ),
    "_cdist_backward": ((ones(5, 6), ones(5, 2), ones(6, 2), 1.0, ones(1, 6)), "cdist has shape [1, 6]"),
    "_fft_c2c": ((torch.ones(3, dtype=torch.complex64), [FAR], 0, True), "out of range for a tensor of 1 dims"),
    "avg_pool2d_backward": (
        (ones(9, 2, 2), ones(1, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
        "grad_output has shape [9, 2, 2], but must have [1, 2, 2]",
    ),
    "reflection_pad1d_backward": ((ones(1, 6), ones(9, 4), [1, 1]), "grad_output has shape [1, 6]"),
    "replication_pad2d_backward": ((ones(1, 6, 6), ones(9, 4, 4), [1] * 4), "grad_output has shape [1, 6, 6]"),
    "reflection_pad1d": ((ones(1, 2, 9), [-MOST - 1] * 2), "padding has values from -9223372036854775808"),
    "reflection_pad3d_backward": ((ones(1, 4, 4, 4), ones(1, 4, 4, 4), [-MOST - 1] * 6), "padding has values"),
    "replication_pad2d": ((ones(1, 9, 9), [MOST, MOST, 0, 0]), "padding has values from 0 to 9223372036854775807"),
    "replication_pad3d.out": ((ones(1, 4, 4, 4), [MOST] * 6), {"out": ones(1, 4, 4, 4)}, "padding has values"),
    "replication_pad1d_backward": ((ones(1, 4), ones(1, 6), [MOST, MOST]), "padding has values"),
    "pad": ((ones(1, 2, 9, 9), [MOST, MOST, 0, 0], "replicate"), "pad has values"),
    "_pad_enum": ((ones(1, 2, 9, 9), [MOST, MOST, 0, 0], 2), "pad has values"),
    "grid_sampler_2d_backward": (
        (ones(1, 3, 5, 5), ones(2, 3, 5, 5), ones(2, 5, 5, 2), 0, 0, False, [True, True]),
        "grad_output has shape [1, 3, 5, 5]",
    ),
    "unfold_backward": ((ones(1, 2, 1), [1, 12], 1, 10, 2), "grad_in has shape [1, 2, 1]"),
    "linalg_ldl_solve": ((ones(3, 3), torch.tensor([1, 2, -1], dtype=torch.int32), ones(3, 3)), "come in pairs"),
    "lu_unpack": ((ones(6, 5), torch.ones(3, dtype=torch.int32)), "LU_pivots has shape [3], but must have [5]"),
    "lcm": ((full(-(1 << 63), 4), full(5, 4)), "absolute value is not in its range"),
    "div.Tensor_mode": ((full(-(1 << 63), 4), full(-1, 4)), {"rounding_mode": "trunc"}, "divided by -1"),
}


def overload(name):
    packet, _, chosen = name.partition(".")
    return getattr(getattr(aten, packet), chosen or "default")


def as_gt(value):
    if isinstance(value, list):
        return [as_gt(item) for item in value]
    return gt.to(value) if isinstance(value, torch.Tensor) else value


def run(name, args, kwargs, convert):
    with torch.no_grad():
        result = overload(name)(*[convert(arg) for arg in args], **{key: convert(arg) for key, arg in kwargs.items()})
    for tensor in tree_leaves(result):
        tensor.cpu()


@pytest.mark.parametrize("name", WRONG)
def test_arguments_out_of_range_are_an_error_of_the_op(name):
    *call, said = WRONG[name]
    args, kwargs = (*call, {})[:2]
    engine = PyTorchEngine("cpu")
    with pytest.raises((ValueError, IndexError, RuntimeError, NotImplementedError)) as caught, engine.isolated():
        engine.resolve(str(overload(name)))(*args, **kwargs)
    assert said in str(caught.value) and f"aten.{name.partition('.')[0]}" in str(caught.value)


class Asked(dict):
    """Arguments that are all missing, and the names that were asked for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return default


FOUND = {"batch", "channels", "classes", "steps"}  # sizes
FOUND |= {"at_risk", "ends", "made", "nbytes", "positions", "rows", "segments"}  # values made of arguments


def test_checks_are_of_arguments_that_ops_have():
    schemas = [(op.split(".")[1].removesuffix("_"), schema_of(op)) for op in all_ops("aten")]
    packets = {name.partition(".")[0] for name in CHECKS}
    assert packets <= {name for name, _ in schemas}
    arguments = {argument.name for name, schema in schemas if name in packets for argument in schema.arguments}
    for name, checks in CHECKS.items():
        asked = Asked()
        for check in checks:
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):  # they are None
                check(asked)
        assert asked.names <= arguments | FOUND, name


@pytest.fixture
def one_process():
    gt.init(workers=1)
    yield
    gt.shutdown()


def test_a_worker_process_survives_all_refused_calls(one_process):
    kept = gt.arange(3.0)
    for name, (*call, _) in WRONG.items():
        args, kwargs = (*call, {})[:2]
        with pytest.raises((gt.OpError, RuntimeError, ValueError, IndexError, NotImplementedError)):
            pytest.fail(f"{name} gave {run(name, args, kwargs, as_gt)}")
        assert (kept + 1).tolist() == [1, 2, 3], name


def test_row_indices_become_row_pointers_wherever_they_lie_in_memory(embedded):
    rows = torch.tensor([0, 9, 1, 9, 1, 9, 3, 9])
    found = torch._convert_indices_from_coo_to_csr(gt.to(rows)[::2], 4)
    assert found.tolist() == torch._convert_indices_from_coo_to_csr(rows[::2].clone(), 4).tolist() == [0, 1, 3, 3, 4]


def test_results_are_not_written_to_elements_that_share_memory():
    with pytest.raises(ValueError, match="cannot be written to"):
        PyTorchEngine("cpu").resolve("aten._log_softmax.out")(ones(2, 3), 1, False, out=ones(1, 1).expand(2, 3))


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "said"),
    [
        ("aten.sum.default", (Input(0),), {"dtype": -1}, "dtype must be a dtype, not -1"),
        ("aten.sum.default", (Input(0),), {"dtype": MemoryFormat("channels_last")}, "must be a dtype"),
        ("aten.view_copy.dtype", (Input(0), 4), {}, "dtype must be a dtype, not 4"),
        ("aten.clone.default", (Input(0),), {"memory_format": 4}, "memory_format must be a format, not 4"),
        ("aten.copy.default", (None, Input(0)), {}, "self must be a tensor, and is missing"),
    ],
)
def test_constants_of_the_wrong_kind_are_refused(op, args, kwargs, said):
    with pytest.raises(TypeError, match=said):
        PyTorchEngine("cpu").check_constants(op, args, kwargs)


def test_constants_of_the_right_kind_pass():
    PyTorchEngine("cpu").check_constants("aten.sum.default", (Input(0),), {"dtype": DType("float64")})
    PyTorchEngine("cpu").check_constants("aten.sum.default", (Input(0),), {"dtype": None})


def test_an_op_without_checks_is_torch_s_own_function():
    assert not isinstance(PyTorchEngine("cpu")._overload("aten.mm.default"), types.FunctionType)
    assert isinstance(PyTorchEngine("cpu")._overload("aten.lcm.default"), types.FunctionType)


def test_padding_behind_the_length_of_a_target_is_not_read():
    targets = torch.tensor([[1, 2, -100], [3, -100, -100]])
    scores = torch.randn(6, 2, 5).log_softmax(2)
    found = PyTorchEngine("cpu").resolve("aten._ctc_loss.default")(scores, targets, [6, 6], [2, 1])
    torch.testing.assert_close(found[0], aten._ctc_loss(scores, targets, [6, 6], [2, 1])[0])


def test_an_ignored_target_may_be_any_number():
    args = (torch.ones(2), torch.ones(2, 3), torch.tensor([1, -100]), None, 0, -100, torch.tensor(1.0))
    found = PyTorchEngine("cpu").resolve("aten.nll_loss_backward.default")(*args)
    torch.testing.assert_close(found, aten.nll_loss_backward(*args))


def test_a_kernel_that_trusts_strides_gets_a_compact_copy():
    args = (torch.randn(1, 6, 3), torch.ones(1).expand(6), None, 1, 6, 3, 2, 1e-5)
    found = PyTorchEngine("cpu").resolve("aten.native_group_norm.default")(*args)
    torch.testing.assert_close(found, aten.native_group_norm(args[0], torch.ones(6), *args[2:]))


@pytest.mark.parametrize("op", ["aten.median.dim", "aten.nanmedian.dim"])
def test_the_median_of_an_expanded_tensor_reads_its_own_memory(op):
    """Torch's kernel reads beyond it, and gives the memory of others."""
    row = torch.arange(5.0)
    values, _ = PyTorchEngine("cpu").resolve(op)(row.expand(500, 5), 0)
    assert values.tolist() == row.tolist()


@pytest.mark.parametrize("op", ["aten.tril.out", "aten.triu.out", "aten.linalg_lu.out"])
def test_a_permuted_out_is_written_inside_its_own_memory(op):
    """Torch's kernels step through the batch dims of an `out=` by one stride, and so leave a permuted one."""
    plain = getattr(aten, op.split(".")[1])
    names = [argument.name for argument in plain.out._schema.arguments if argument.is_out]
    matrices = torch.randn(3, 3, 5, 5)
    around = {name: torch.full((3 * 625,), 7.0) for name in names}  # the middle part is the argument's memory
    outs = {name: memory[625 : 625 + 225].view(5, 5, 3, 3).permute(3, 2, 1, 0) for name, memory in around.items()}
    given = PyTorchEngine("cpu").resolve(op)(matrices, **outs)
    torch.testing.assert_close(list(outs.values()), tree_leaves(plain(matrices)))
    assert all(one is out for one, out in zip(tree_leaves(given), outs.values(), strict=True))
    assert all((memory[:625] == 7).all() and (memory[850:] == 7).all() for memory in around.values())
