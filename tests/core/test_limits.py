"""The text of limits, and what cannot be one."""

import pytest

from gt.core.settings import Limits, parse_bytes, parse_limits


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", Limits()),
        ("bytes=4GiB", Limits(bytes=4 << 30)),
        ("tensors=10000, instructions=5000", Limits(tensors=10000, instructions=5000)),
        ("bytes=512M,tensors=256,instructions=512", Limits(512 << 20, 256, 512)),
    ],
)
def test_limits(text, limits):
    assert parse_limits(text) == limits


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("byte=4GiB", "did you mean 'bytes'"),
        ("bytes", "for example bytes=4GiB"),
        ("bytes=much", "bytes=much: expected a number of bytes"),
        ("bytes=0", "bytes=0: expected at least 1 byte"),
        ("bytes=999999999999999T", "less than 8 EiB"),
        ("tensors=0", "at least 256"),
        ("tensors=-1", "at least 256"),
        ("instructions=5", "at least 512"),
        ("tensors=500,tensors=600", "tensors is given twice"),
    ],
)
def test_what_cannot_be_a_limit(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_limits(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1000", 1000), ("1k", 1024), ("8G", 8 << 30), ("8GB", 8 << 30), ("8gib", 8 << 30)]
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes
