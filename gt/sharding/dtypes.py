"""Properties of dtypes, by name: wider dtypes for sums, and the identities of reductions."""

from __future__ import annotations

_WIDE = {"float16": "float32", "bfloat16": "float32", "uint16": "int64", "uint32": "int64", "uint64": "int64"}
_WIDE |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "float32")
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_INT_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UINT_BITS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}


def accumulation_dtype(dtype: str) -> str:
    """The dtype in which values of a dtype are summed. Torch uses the same, or cannot sum the dtype at all."""
    return _WIDE.get(dtype, dtype)


def real_dtype(dtype: str) -> str:
    """The dtype of absolute values."""
    return _REAL.get(dtype, dtype)


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def is_complex(dtype: str) -> bool:
    return dtype in _REAL


def cast_keeps_sums(source: str, target: str) -> bool:
    """Whether a sum gives the same before and after a cast: to the same dtype, or to a wider float."""
    return source == target or (is_floating(source) and target in (accumulation_dtype(source), "float64"))


def lowest(dtype: str) -> bool | int | float:
    """The lowest value of a dtype: the identity of max."""
    if dtype == "bool":
        return False
    if dtype in _UINT_BITS:
        return 0
    return -(1 << _INT_BITS[dtype] - 1) if dtype in _INT_BITS else float("-inf")


def highest(dtype: str) -> bool | int | float:
    """The highest value of a dtype: the identity of min."""
    if dtype == "bool":
        return True
    if dtype in _UINT_BITS:
        return (1 << _UINT_BITS[dtype]) - 1
    return (1 << _INT_BITS[dtype] - 1) - 1 if dtype in _INT_BITS else float("inf")


def identity(kind: str, dtype: str) -> bool | int | float:
    """The identity of a reduction."""
    if kind in ("max", "min"):
        return lowest(dtype) if kind == "max" else highest(dtype)
    if kind == "sum" and (is_floating(dtype) or is_complex(dtype)):
        return -0.0  # -0.0 + 0.0 would lose its sign
    one = kind in ("prod", "and")
    return one if dtype == "bool" else int(one)
