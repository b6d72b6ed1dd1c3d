"""Tables of debug output: aligned, of limited width, and silent while nobody reads them."""

import logging

import pytest

from gt.core.tables import HEADER_EVERY, Column, LogTable, align, shorten

COLUMNS = (Column("op", 6), Column("bytes", 7, is_number=True), Column("line", 10, keeps_end=True))


@pytest.fixture
def table(caplog):
    caplog.set_level(logging.DEBUG, "gt.test.rows")
    return LogTable("gt.test.rows", "plan", COLUMNS)


def test_rows_are_aligned_under_a_header(table, caplog):
    table.add(("mm", "12 B", "train.py:3"))
    table.add(("embedding", "", "/home/user/train.py:12"), ["chosen  m=dp"])
    assert [record.message for record in caplog.records] == [
        "      op        bytes  line\nplan  mm         12 B  train.py:3",
        "plan  embed…        -  …ain.py:12\n      chosen  m=dp",
    ]


def test_the_header_comes_again_after_many_rows(table, caplog):
    for _ in range(HEADER_EVERY + 1):
        table.add(("mm", "1 B", "a.py:1"))
    with_header = [number for number, record in enumerate(caplog.records) if "bytes" in record.message]
    assert with_header == [0, HEADER_EVERY]


def test_a_table_that_nobody_reads_is_off():
    assert not LogTable("gt.test.unread", "plan", COLUMNS).is_on


@pytest.mark.parametrize(
    ("text", "width", "keeps_end", "expected"),
    [("abc", 3, False, "abc"), ("abcd", 3, False, "ab…"), ("abcd", 3, True, "…cd")],
)
def test_long_texts_lose_an_end(text, width, keeps_end, expected):
    assert shorten(text, width, keeps_end=keeps_end) == expected


def test_lines_below_a_row_are_as_wide_as_their_cells():
    rows = [("chosen", "1 B", "[dp]"), ("moves", "100 kB", "a" * 200)]
    assert align(rows, numbers=(1,), width=30) == ["chosen     1 B  [dp]", "moves   100 kB  " + "a" * 13 + "…"]
