"""Type checkers on a program of a user, who has installed GT in editable mode."""

import subprocess
import sys

import pytest

PROGRAM = """\
import gt
import torch

class Net(gt.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = gt.nn.Linear(2, 3)

@gt.compile
def scaled(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times

@gt.compile(state=[])
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2

reveal_type(gt.to(torch.nn.Linear(1, 2)))       # Linear
reveal_type(gt.to(torch.ones(2)).spec)          # ShardingSpec
reveal_type(gt.nn.Linear(1, 2))                 # Linear
reveal_type(gt.cat([gt.ones(2), gt.ones(3)]))   # Tensor
reveal_type(gt.optim.SGD([gt.ones(1)]))         # SGD
reveal_type(gt.randn(2, dtype=gt.float32).spec) # ShardingSpec
reveal_type(scaled(gt.ones(2), 3))              # Tensor
reveal_type(halved(gt.ones(2)))                 # Tensor
reveal_type(gt.shard(gt.ones(2), gt.mesh(1)).spec)  # ShardingSpec
reveal_type(gt.distributed.matmul(gt.ones(2, 2), gt.ones(2, 2)))  # Tensor
reveal_type(gt.distributed.ppermute(gt.ones(2), "x", []).spec)  # ShardingSpec
reveal_type(gt.distributed.is_initialized())    # bool
reveal_type(gt.ones(2).shards()[0].data)        # Tensor
gt.no_such_name             # error
gt.distributed.no_such_name  # error
gt.nn.NoSuchLayer           # error
scaled(gt.ones(2), "a")     # error
scaled(gt.ones(2))          # error
gt.to("a text")             # error
"""
CHECKERS = {
    "mypy": ["mypy", "--no-incremental", "--config-file", "", "train.py"],
    "basedpyright": ["basedpyright", "--pythonpath", sys.executable, "train.py"],
}


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    any("finder" in name and "gt_tensor" in name for name in sys.modules),
    reason="GT is installed by an import hook, which checkers do not follow: pip install -e . again",
)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_of_a_user_is_checked(checker, tmp_path):
    pytest.importorskip(checker)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", *CHECKERS[checker]]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False).stdout
    said = {number: [] for number in range(1, PROGRAM.count("\n") + 1)}
    for line in found.splitlines():
        _, is_of_program, rest = line.partition("train.py:")
        if is_of_program:
            said[int(rest.split(":")[0])].append(rest)
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        code, _, expected = line.partition("  # ")
        if expected == "error":
            assert any("error" in text for text in said[number]), (code, found)
        elif expected:
            assert any(f'{expected}"' in text for text in said[number]), (code, found)
        else:
            assert not any("error" in text for text in said[number]), (code, found)
