"""What GT does about habits of torch: programs start without what they do not use, and can still use it."""

from __future__ import annotations

import pytest

from tests.programs import finish, start

OPS = """
import gc, sys, torch, gt
model = gt.to(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2)))
loss = torch.nn.functional.cross_entropy(model(gt.randn(8, 4)).relu(), gt.zeros(8, dtype=torch.int64))
loss.backward()
x = gt.ones(2, 3)
torch.cat([x * 2 + x[0], torch.where(x > 0, x, 0)]).softmax(-1).mean(0).tolist()
HEAVY = ("sympy.core", "torch._dynamo", "torch.distributed.tensor")
print(sorted(name for name in sys.modules if name in HEAVY), gc.isenabled())
"""

USES = {
    "dynamo": """
def double(x): return torch.nn.functional.gelu(x) * x.shape[0]
compiled = torch.compile(double, backend="eager", dynamic=True)
print(all(torch.equal(compiled(torch.ones(n)), double(torch.ones(n))) for n in (3, 5)))
""",
    "dtensor": """
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
y = (x @ x).relu()
print(type(y) is DTensor and bool((y.full_tensor() == 4).all()) and (gt.ones(2) + 1).tolist() == [2, 2])
dist.destroy_process_group()
""",
    "sympy": """
from sympy.abc import a
import sympy.core.numbers
print(str(sympy.expand((a + 1) ** 2)) == "a**2 + 2*a + 1" and isinstance(a, sympy.Basic))
""",
    "symbolic shapes": """
import torch.fx.experimental.symbolic_shapes as shapes
before = shapes.guard_or_false
size = shapes.ShapeEnv().create_unbacked_symint()
print(shapes.guard_or_false is not before and before(size == 3) is False and not shapes.is_nested_int(size))
""",
    "symbolic shapes in threads": """
import threading
import torch.fx.experimental.symbolic_shapes as shapes
found = []
def ask(name): found.append(callable(getattr(shapes, name)))
threads = [threading.Thread(target=ask, args=[name]) for name in ("ShapeEnv", "guard_bool", "guard_or_true") * 3]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found == [True] * 9)
""",
}

ANSWERS = """
import gt
gt.Tensor
import torch.fx.experimental.symbolic_shapes as shapes
CALLS = {
    "expect_true": [(True,), (False,), (True, 1)], "guard_int": [(3,)], "guard_or_false": [(True,), (False,)],
    "guard_or_true": [(True,), (False,)], "guard_size_oblivious": [(True,), (False,)],
    "guarding_hint_or_throw": [(3,), (True,)], "has_guarding_hint": [(3,)], "is_nested_int": [(3,)],
    "statically_known_true": [(True,), (False,)], "sym_and": [(True, True, False), (True,), (True, True)],
    "sym_eq": [(3, 3), (3, 4), ((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1,), (1, 1)), ((), ())],
    "sym_or": [(False, False), (False, True), (False,)],
}
def answers(): return {name: [getattr(shapes, name)(*call) for call in calls] for name, calls in CALLS.items()}
assert set(shapes._stand_ins) == set(CALLS), shapes._stand_ins
plain = answers()
shapes.ShapeEnv
assert type(shapes) is type(gt)
assert answers() == plain, (answers(), plain)
"""


@pytest.mark.parametrize("use", USES)
def test_ops_import_nothing_heavy_and_all_of_it_still_works(use: str) -> None:
    code, out, err = finish(start("-c", OPS + USES[use]))
    assert (code, out.split("\n")[:2]) == (0, ["[] True", "True"]), err


def test_what_stands_in_answers_as_torch() -> None:
    code, _, err = finish(start("-c", ANSWERS))
    assert code == 0, err
