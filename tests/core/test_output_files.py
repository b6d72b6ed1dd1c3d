"""Files of names that the user gives are written, and nothing that another user has put there."""

import os
import sys

import pytest

from gt.core.output_files import make_parents, open_binary, open_text

OTHER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def shared(tmp_path):
    """A directory in which everybody can write, as /tmp, beside a private one with a file."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "private").mkdir(mode=0o755)
    (tmp_path / "private" / "precious").write_text("kept")
    return tmp_path / "shared"


def write(path):
    with open_text(path) as file:
        file.write("log")


def plant(path, target):
    """A link of another user."""
    path.symlink_to(target)
    os.lchown(path, OTHER, OTHER)


@needs_root
@pytest.mark.parametrize("target", ["private/precious", "private/new"])
def test_a_planted_link_is_not_followed(shared, target):
    plant(shared / "debug.log", shared.parent / target)
    with pytest.raises(PermissionError, match=f"debug.log.* link 'debug.log' of user {OTHER}; another user may"):
        write(shared / "debug.log")
    assert [path.read_text() for path in (shared.parent / "private").iterdir()] == ["kept"]


@needs_root
def test_a_planted_directory_leads_nowhere_else(shared):
    plant(shared / "traces", shared.parent / "private")
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", OTHER, OTHER)
    plant(shared / "theirs" / "link", "../../private")
    for path in ("traces/precious", "theirs/link/precious", "theirs/../traces/precious"):
        with pytest.raises(PermissionError, match="another user may have put it there"):
            write(shared / path)
    with pytest.raises(PermissionError, match="another user may have put it there"):
        make_parents(shared / "traces" / "new" / "run.json")
    assert [path.name for path in (shared.parent / "private").iterdir()] == ["precious"]


@needs_root
def test_files_of_others_are_not_written_in_a_shared_directory(shared):
    (shared / "file").write_text("theirs")
    os.mkfifo(shared / "pipe")  # to open it would wait for a reader
    for name in ("file", "pipe"):
        os.chown(shared / name, OTHER, OTHER)
        with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
            write(shared / name)
    assert (shared / "file").read_text() == "theirs"


def test_a_second_name_of_an_own_file_is_not_written_in_a_shared_directory(shared):
    os.link(shared.parent / "private" / "precious", shared / "debug.log")
    with pytest.raises(PermissionError, match="has 2 names"):
        write(shared / "debug.log")
    assert (shared / "debug.log").read_text() == "kept"


def test_own_links_files_and_names_are_written(shared):
    private = shared.parent / "private"
    (shared / "mine").symlink_to("../private")
    (private / "first").symlink_to("second")
    (private / "second").symlink_to(shared / "third")
    write(shared / "mine" / "first")
    assert (shared / "third").read_text() == "log"
    with open_text(shared / "third", "a") as file:
        file.write(", more")
    assert (shared / "third").read_text() == "log, more"
    make_parents(shared / "mine" / "a" / "b" / "run.json")
    with open_binary(shared / "mine" / "a" / "b" / "run.json") as trace:
        trace.write(b"{}")
    assert (private / "a" / "b" / "run.json").read_text() == "{}"


def test_devices_and_descriptors_are_written():
    write("/dev/null")
    reader, writer = os.pipe()
    with os.fdopen(reader) as said:
        write(f"/dev/fd/{writer}")
        os.close(writer)
        assert said.read() == "log"


@pytest.mark.parametrize(
    ("name", "error"), [("none/file", FileNotFoundError), ("", IsADirectoryError), ("loop", OSError)]
)
def test_errors_name_the_path(tmp_path, name, error):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(error, match=str(tmp_path)):
        write(tmp_path / name)


def test_many_writers_may_make_a_file_at_the_same_time(tmp_path):
    program = "import sys; from gt.core.output_files import open_text; open_text(sys.argv[1]).close()"
    found = [os.spawnl(os.P_NOWAIT, sys.executable, "python", "-c", program, f"{tmp_path}/log") for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in found] == [0] * 4
