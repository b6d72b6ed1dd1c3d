"""Lists the aten ops that run on shards: `python -m gt.sharding.coverage`.

rule        the op has an entry in the table of rules
decomposed  torch calls other ops instead: the op is a composite, or runs on each tensor of a list
fallback    the op runs on whole tensors: its inputs are gathered

An overload that writes counts as the overload that computes the same without writing. DTensor of torch 2.13, counted in
the same way, has rules for 159 of the 193 core overloads, and for 1126 overloads of 612 ops in all.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C import DispatchKey, _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key
from torch._ops import OpOverload

from gt.sharding.rules import entry_of

RULE, DECOMPOSED, FALLBACK = "rule", "decomposed", "fallback"
MODEL_OPS = Path(__file__).with_name("model_ops.txt")

_ANY_SIZE = "the number of its results depends on values"
_ANY_DRAWS = "the number of random draws per element depends on values"
_STORAGE = "about the one storage behind a tensor, which shards do not have; done in the client"
_ANSWERS = "returns a Python value, which is read from a worker"
_BACKEND = "a kernel of one backend, below the ops that GT sees"
_SPARSE = "of sparse tensors, which GT does not have"
_QUANTIZED = "of quantized tensors, which GT does not have"
_NESTED = "of nested tensors, which GT does not have"
_SYMBOLS = "about symbolic shapes, which GT does not have"
_INTERNAL = "for torch's own use"

# Ops that cannot run on shards, by patterns, and why.
CANNOT: dict[str, str] = {
    **dict.fromkeys(
        ["nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_*", "repeat_interleave"], _ANY_SIZE
    ),
    **dict.fromkeys(["binomial", "poisson", "_standard_gamma", "_sample_dirichlet"], _ANY_DRAWS),
    **dict.fromkeys(
        ["as_strided*", "resize*", "_resize_output*", "set", "set_", "_pin_memory", "_reshape_alias*", "_lazy_clone"],
        _STORAGE,
    ),
    **dict.fromkeys(["_local_scalar_dense", "is_pinned", "is_same_size", "is_set_to", "_has_same_storage*"], _ANSWERS),
    **dict.fromkeys(
        [
            "*cudnn*", "*miopen*", "*mkldnn*", "*mps*", "*_overrideable*", "*nnpack*", "*triton*", "_slow_conv*",
            "slow_conv*", "_conv_depthwise*", "conv_depthwise*", "_cslt*", "_mixed_dtypes*", "_fused_sdp_choice",
            "_thnn_fused*", "_transformer_encoder*", "_native_multi_head*", "_transform_bias*", "record_stream",
        ],
        _BACKEND,
    ),
    **dict.fromkeys(
        [
            "*sparse*", "*coalesce*", "*indices", "*indices_copy", "_dimI", "_dimV", "dense_dim", "_nnz", "values*",
            "_values*", "hspmm", "sspaddmm", "_spsolve", "_spdiags", "_to_dense", "native_norm", "_indices*",
            "_convert_indices*",
        ],
        _SPARSE,
    ),
    **dict.fromkeys(
        ["*quantize*", "q_*", "qscheme", "int_repr", "*int4pack*", "*int8pack*", "_dyn_quant*", "*moving_avg_obs*"],
        _QUANTIZED,
    ),
    **dict.fromkeys(["_nested*", "*jagged*", "to_padded_tensor", "*_feature_meta"], _NESTED),
    **dict.fromkeys(["*sym_constrain*", "_assert_scalar", "_functional_assert_scalar"], _SYMBOLS),
    **dict.fromkeys(
        [
            "_test_*", "_foobar", "_print", "*dep_token", "_make_dual*", "_fw_primal*", "_copy_from*", "*_mem_eff_*",
            "_efficientzerotensor", "from_file", "_assert_tensor_metadata", "_linalg_check_errors", "_use_*",
            "slice_inverse",
        ],
        _INTERNAL,
    ),
}  # fmt: skip


class Row(NamedTuple):
    op: str
    kind: str
    reason: str


# --- One op -----------------------------------------------------------------------------------------------------------


def row_of(op: OpOverload) -> Row:
    if _is_decomposed(op):
        return Row(str(op), DECOMPOSED, "")
    functional = _without_writes(op)
    if functional is not None and entry_of(functional) is not None:
        return Row(str(op), RULE, "")
    name = op.overloadpacket.__name__
    return Row(str(op), FALLBACK, next((why for shape, why in CANNOT.items() if fnmatch.fnmatchcase(name, shape)), ""))


def _is_decomposed(op: OpOverload) -> bool:
    if str(op).startswith("aten._foreach_"):
        return _has_kernel(op, DispatchKey.CompositeExplicitAutograd)
    return _has_kernel(op, DispatchKey.CompositeImplicitAutograd) and not _has_kernel(op, DispatchKey.CPU)


def _has_kernel(op: OpOverload, key: DispatchKey) -> bool:
    return bool(_dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _without_writes(op: OpOverload) -> str | None:
    """The overload that computes the same and writes to no argument; the op itself if it writes only a tensor's shape
    (`t_`)."""
    arguments = op._schema.arguments
    if not any(_is_written(a) for a in arguments) or torch.Tag.inplace_view in op.tags:
        return str(op)
    name = op._opname.removesuffix("_")
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for other in [*_overloads(name), *_overloads(f"{name}_functional")]:
        own = other._schema.arguments
        if [(a.name, str(a.type)) for a in own] == wanted and not any(a.alias_info for a in own):
            return str(other)
    return None


def _is_written(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


# --- Sets of ops ------------------------------------------------------------------------------------------------------


def aten_ops() -> list[OpOverload]:
    """All registered aten ops, including those that `torch.ops.aten` has not loaded yet."""
    names = sorted(name.removeprefix("aten::") for name in _dispatch_get_all_op_names() if name.startswith("aten::"))
    pairs = [name.partition(".") for name in names]
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in pairs]


def core_ops() -> list[OpOverload]:
    return [op for op in aten_ops() if torch.Tag.core in op.tags]


def model_ops() -> dict[str, list[str]]:
    """The ops in a training step of each model, as recorded by tests/sharding/model_ops.py."""
    users: dict[str, list[str]] = {}
    for line in MODEL_OPS.read_text().splitlines():
        op, *models = line.split()
        for model in models:
            users.setdefault(model, []).append(op)
    return users


# --- The command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gt.sharding.coverage", description="Which aten ops run on shards.")
    parser.add_argument("--core", action="store_true", help="only the ops of core aten")
    parser.add_argument("--missing", action="store_true", help="only the ops that fall back to whole tensors")
    options = parser.parse_args(arguments)
    rows = {str(op): row_of(op) for op in aten_ops()}
    core = [str(op) for op in core_ops()]
    listed = [rows[op] for op in (core if options.core else rows)]
    lines = [
        *_listing([row for row in listed if row.kind == FALLBACK or not options.missing]),
        "",
        *_totals(rows, core),
    ]
    sys.stdout.write("".join([f"{line}\n" for line in lines]))


def _listing(rows: Sequence[Row]) -> Iterator[str]:
    width = max([len(row.op) for row in rows], default=0)
    for row in rows:
        yield f"{row.op:{width}}  {row.kind:10}  {row.reason}".rstrip()


def _totals(rows: dict[str, Row], core: Iterable[str]) -> Iterator[str]:
    sets = {"core aten": core, "all aten": rows, **model_ops()}
    yield f"{'overloads of':12}{'ops':>6}{'all':>6}{RULE:>6}{DECOMPOSED:>12}{FALLBACK:>10}  of which cannot be cut"
    for name, ops in sets.items():
        chosen = [rows[op] for op in ops]
        kinds = Counter(row.kind for row in chosen)
        packets = len({row.op.rpartition(".")[0] for row in chosen})
        cannot = sum(1 for row in chosen if row.reason)
        counts = f"{packets:6}{len(chosen):6}{kinds[RULE]:6}{kinds[DECOMPOSED]:12}{kinds[FALLBACK]:10}{cannot:6}"
        yield f"{name:12}{counts}"


if __name__ == "__main__":
    main()
