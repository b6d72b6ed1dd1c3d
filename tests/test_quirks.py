"""What GT does about habits of torch."""

from __future__ import annotations

from tests.programs import finish, start

PROGRAM = """
import sys, torch, gt
model = gt.to(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2)))
loss = torch.nn.functional.cross_entropy(model(gt.randn(8, 4)), gt.zeros(8, dtype=torch.int64))
loss.backward()
print(sorted(name for name in sys.modules if name == "torch._dynamo"))
compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) + 1, backend="eager")
print(torch.equal(compiled(torch.ones(3)), torch.nn.functional.gelu(torch.ones(3)) + 1))
"""


def test_shape_functions_do_not_import_dynamo_which_still_works() -> None:
    code, out, err = finish(start("-c", PROGRAM))
    assert (code, out.split("\n")[:2]) == (0, ["[]", "True"]), err
