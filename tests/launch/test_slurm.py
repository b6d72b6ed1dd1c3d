"""Batch scripts for SLURM, and how a job watches its parts. A real SLURM is in `test_slurm_cluster.py`."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

import gt
from gt.launch import slurm, slurm_job
from gt.launch.commands import Command
from gt.wire.server_keys import read_authorized, read_client_key, read_server_key
from tests.subprocesses import ROOT

SCRIPT = """#!/bin/sh
#SBATCH --job-name=gt-train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=1:00:00
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --exclusive
#SBATCH --mail-type=END

exec /env/bin/python -P -m gt.launch.slurm_job --workers-per-node=8 --min-workers=32 --timeout=300 -- train.py --lr 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    return tmp_path


def script(capsys, *arguments):
    assert slurm.main(shlex.split(" ".join(arguments))) == 0
    return capsys.readouterr().out


def test_the_batch_script_asks_for_nodes_and_runs_the_job(capsys):
    options = "--nodes 4 --gpus-per-node a100:8 --time 1:00:00 --partition gpu --account team --python /env/bin/python"
    text = script(capsys, options, "--sbatch=--exclusive --sbatch=--mail-type=END --dry-run train.py --lr 3")
    assert text == SCRIPT


def test_cpu_nodes_have_as_many_workers_as_asked_for(capsys):
    text = script(
        capsys,
        *[
            "--nodes",
            "2",
            "--workers-per-node",
            "3",
            "--cpus-per-worker",
            "5",
            "--min-workers",
            "4",
            "--dry-run",
            "x.py",
        ],
    )
    assert "--ntasks-per-node=3\n#SBATCH --cpus-per-task=5\n" in text
    assert "--workers-per-node=3 --min-workers=4 " in text


def test_arguments_of_the_program_are_its_own(capsys):
    """Also those that this command has, and what a shell would change."""
    text = script(capsys, "--dry-run --job-name 'my job' train.py --nodes '2 3' '$HOME' -- --wait")
    assert text.startswith("#!/bin/sh\n#SBATCH --job-name='my job'\n#SBATCH --nodes=1\n")
    command = text.splitlines()[-1]
    assert shlex.split(command)[-6:] == ["train.py", "--nodes", "2 3", "$HOME", "--", "--wait"]
    options = slurm_job._parse(shlex.split(command)[5:])
    assert options.program == ["train.py", "--nodes", "2 3", "$HOME", "--", "--wait"]


def test_the_command_of_the_page_makes_a_script(capsys):
    page = (ROOT / "docs" / "cluster.md").read_text()
    (command,) = re.findall("^python -m gt.launch.slurm (.*)", page, re.MULTILINE)
    text = script(capsys, "--dry-run", command)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n#SBATCH --time=2:00:00\n" in text
    assert text.endswith(" -- train.py --lr 3e-4\n")


def test_a_module_is_a_program(capsys):
    text = script(capsys, "--dry-run -- -m team.train --lr 3")
    assert "--job-name=gt-team" in text
    assert slurm_job._parse(shlex.split(text.splitlines()[-1])[5:]).program == ["-m", "team.train", "--lr", "3"]


def test_a_script_is_written_for_another_machine(here, capsys):
    assert slurm.main(["--script", "job.sh", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out == "job.sh\n" and "sbatch job.sh" in err
    assert (here / "job.sh").read_text().startswith("#!/bin/sh\n#SBATCH ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py"], "no `sbatch` on this machine.*--script FILE"),
        (["missing.py"], "no program 'missing.py'"),
        (["--sbatch=exclusive", "train.py"], "no option of sbatch.*--sbatch=--exclusive"),
        (["--job-name", "a\nb", "train.py"], "line break"),
        (["--script", "no/where.sh", "train.py"], "cannot be written"),
    ],
)
def test_what_cannot_be_submitted_is_explained(here, capsys, arguments, said):
    assert slurm.main(arguments) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--nodes", "0", "x.py"], ["--gpus-per-node", "many", "x.py"], []])
def test_wrong_arguments_are_a_matter_of_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        slurm.main(arguments)


def test_outside_of_a_job_nothing_is_started(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm_job.main(["--workers-per-node=1", "--min-workers=1", "--", "train.py"]) == 1
    assert "python -m gt.launch.slurm" in capsys.readouterr().err


def test_keys_of_a_job_are_private_and_end_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_job, "_output", lambda command: "8\n")
    for name in ("here-7", "here-8", "there-7", "notes"):
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o700)
    with slurm_job._job_keys(tmp_path, "here-9") as keys:
        client = read_client_key(keys)
        assert client.server == read_server_key(keys).public
        assert list(read_authorized(keys)) == [client.public]
        found = [keys, *keys.rglob("*")]
        assert {oct(path.stat().st_mode & 0o777) for path in found if path.is_dir()} == {"0o700"}
        assert {oct(path.stat().st_mode & 0o777) for path in found if path.is_file()} == {"0o600"}
    # job 7 of this cluster was killed; 7 of another cluster may be running
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here-8", "notes", "there-7"]


def test_keys_are_not_put_where_others_can_reach(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(gt.SettingsError, match="mode 755"), slurm_job._job_keys(tmp_path, "here-9"):
        pass


def test_workers_wait_until_their_node_sees_the_keys(tmp_path):
    """And say what to do if it never does."""
    environment = {**os.environ, "GT_KEYS": str(tmp_path)}
    command = slurm_job.after_keys(["echo", "a b", "$HOME"], seconds=1)
    missing = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert missing.returncode == 1
    assert f"does not see {tmp_path}" in missing.stderr and "--directory" in missing.stderr
    (tmp_path / "client.key").touch()
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout == "a b $HOME\n"


@pytest.mark.parametrize(
    ("addresses", "interface", "address"),
    [
        ({"one": "10.0.0.1"}, "", "127.0.0.1"),  # nobody else has to reach it
        ({"one": "10.0.0.1", "two": "127.0.0.1"}, "", "127.0.0.1"),
        ({"one": "10.0.0.1", "two": "127.0.0.1"}, "lo", "127.0.0.1"),
        ({"one": "10.0.0.1"}, "lo", "127.0.0.1"),
    ],
)
def test_the_first_node_is_reached_by_the_others(monkeypatch, addresses, interface, address):
    def answer(command):
        return " ".join(addresses) if "hostnames" in command else f"NodeName=two NodeAddr={addresses['two']} Port=1"

    monkeypatch.setattr(slurm_job, "_output", answer)
    variables = {"SLURM_JOB_NODELIST": "x", "SLURMD_NODENAME": "one", "GT_INTERFACE": interface}
    assert slurm_job._own_address(variables) == address


def test_a_node_that_others_cannot_reach_is_an_error(monkeypatch):
    def answer(command):
        return "one two" if "hostnames" in command else "NodeName=two NodeAddr=10.0.0.2"

    monkeypatch.setattr(slurm_job, "_output", answer)
    monkeypatch.setattr(slurm_job, "reaching_address", lambda interface, other: "127.0.0.1")
    with pytest.raises(gt.SettingsError, match=r"two \(10.0.0.2\).*GT_INTERFACE"):
        slurm_job._own_address({"SLURM_JOB_NODELIST": "x", "SLURMD_NODENAME": "one"})


SLEEPING = "import time; time.sleep(60)"


@pytest.fixture
def parts():
    with slurm_job._Parts() as parts:
        yield lambda code: parts.start(Command([sys.executable, "-c", code]))


def test_a_job_ends_with_the_exit_code_of_its_program(parts):
    assert slurm_job._watch(parts("raise SystemExit(3)"), parts(SLEEPING), parts(SLEEPING)) == 3
    killed = parts(f"import os; os.kill(os.getpid(), {signal.SIGKILL})")
    assert slurm_job._watch(killed, parts(SLEEPING), parts(SLEEPING)) == 128 + signal.SIGKILL


def test_a_program_without_workers_is_ended(parts, monkeypatch, capsys):
    monkeypatch.setattr(slurm_job, "_LOSS_SECONDS", 0.1)
    assert slurm_job._watch(parts(SLEEPING), parts(SLEEPING), parts("")) == 1
    assert "all workers ended before the program" in capsys.readouterr().err
