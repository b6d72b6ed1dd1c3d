"""The text of lines: of files of code only, since clients of a server name the files."""

import linecache
import os

from gt.web_dashboard import watcher
from gt.web_dashboard.watcher import MAX_FILE, code_of


def test_the_text_of_a_line_of_a_program(tmp_path):
    (tmp_path / "train.py").write_text("a = 1\n  b = 2\n")
    assert code_of(f"{tmp_path}/train.py:2") == "b = 2"
    assert code_of(f"{tmp_path}/train.py:9") == code_of("train.py:2") == code_of("no line") == ""


def test_other_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "large.py").write_bytes(b"x" * (MAX_FILE + 1))
    (tmp_path / "secret.key").write_text("secret\n")
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    for name in ("pipe.py", "large.py", "secret.key", "endless.py", "a\0.py", "missing.py"):
        assert code_of(f"{tmp_path}/{name}:1") == ""


def test_the_number_of_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "MAX_FILES", len(linecache.cache))
    (tmp_path / "one_more.py").write_text("a = 1\n")
    assert code_of(f"{tmp_path}/one_more.py:1") == ""
