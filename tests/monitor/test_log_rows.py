"""Rows of a log: written in both formats, and read again."""

import msgspec
import pytest

from gt.core.errors import SettingsError
from gt.monitor.activity import MessageSeen
from gt.monitor.log_rows import COLUMNS, FORMATS, LogRow, read_rows, row_of
from tests.records import own

SEEN = [
    MessageSeen(1, "CONNECT", "worker 0", "-", -1, (), (), "", ""),
    MessageSeen(2, "RECV", "client 1", "CreateTensor", 16, (own(1),), (), "", "my train.py:12"),
    MessageSeen(3, "SEND", "client 1", "Fetched", 0, (), (), "", "", own(7)),
    MessageSeen(4, "WORKER_SEND", "worker 1", "WorkerRunOp", -1, (own(1), own(2)), (own(3),), "aten.mm", "a.py:1", 0,
                (("scope", "50% of it"), ("spec", "x,-"))),
]  # fmt: skip
ROWS = [row_of(seen, seen.time / 8, number) for number, seen in enumerate(SEEN, 1)]


def write(path, format, rows=ROWS):
    path.write_text(FORMATS[format].header + "".join(map(FORMATS[format].line, rows)))
    return read_rows(path)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_read_as_they_were_written(tmp_path, format):
    read = write(tmp_path / "log", format)
    assert [msgspec.structs.replace(row, command=row.command or "-") for row in read] == ROWS


def test_a_row_of_text_has_no_space_in_a_detail():
    assert FORMATS["text"].line(ROWS[3]).endswith("a.py:1                    scope=50%25%20of%20it spec=x,-\n")


def test_ids_are_complete_in_json_only(tmp_path):
    row = row_of(MessageSeen(0, "RECV", "client 1", "FreeTensors", -1, tuple(map(own, range(9))), (), "", ""), 0, 1)
    assert write(tmp_path / "log", "text", [row])[0].ids == "0,1,2,3,+5"
    assert write(tmp_path / "log", "jsonl", [row])[0].ids == "0,1,2,3,4,5,6,7,8"


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_break_lines_and_columns_do_not_break_the_log(tmp_path, format):
    row = row_of(MessageSeen(0, "RECV", "client 1", "A", -1, (), (), "a\nb", "two  spaces\r\udc80.py:1"), 0, 1)
    (read,) = write(tmp_path / "log", format, [row])
    assert isinstance(read, LogRow)
    assert (read.op, read.site.replace("  ", " ")) == ("a?b", "two spaces??.py:1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("loss 0.3\n", r":1: this is no instruction log.* begins with 'loss 0.3'"),
        ('{"seq": 1}\n', r":1: this row cannot be read: .*elapsed_s"),
        ("HEADER 1.0  2  RECV\n", r":2: this row cannot be read: it has 3 columns, not 10"),
        ("HEADER x  2  RECV  client 1  A  -  -  -  -  -\n", r":2: this row cannot be read: could not convert .*'x'"),
        ("HEADER 1.0  2  RECV  client 1  A  -  -  -  -  shape\n", r":2: .*'shape' among the details"),
    ],
)
def test_a_file_that_is_no_log_is_an_error_with_its_line(tmp_path, text, problem):
    path = tmp_path / "log"
    path.write_text(text.replace("HEADER ", "  ".join(COLUMNS) + "\n"))
    with pytest.raises(SettingsError, match=problem):
        read_rows(path)


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path):
    whole = write(tmp_path / "log", "text")
    with (tmp_path / "log").open("a") as file:
        file.write("    9.999")
    assert read_rows(tmp_path / "log") == whole


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "log").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path / "log", tmp_path):
        with pytest.raises(SettingsError, match="cannot be read as a log"):
            read_rows(path)
