"""What GT does about habits of torch: programs start without what they do not use, and can still use it."""

from __future__ import annotations

import pytest

from tests.subprocesses import finish, start

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
assert "sympy" not in sys.modules
import sympy.core.numbers
from sympy.abc import a
print(str(sympy.expand((a + 1) ** 2)) == "a**2 + 2*a + 1" and sympy.core.numbers.Integer(3) == 3)
assert isinstance(a, sympy.Basic) and sympy.__version__ and torch.optim.SGD([gt.ones(1)])
assert (gt.ones(2) * 2 + 1).tolist() == [3, 3]
""",
    "symbolic shapes": """
import torch.fx.experimental.symbolic_shapes as shapes
before = shapes.guard_or_false
size = shapes.ShapeEnv().create_unbacked_symint()
print(shapes.guard_or_false is not before and before(size == 3) is False and not shapes.is_nested_int(size))
""",
    "all of symbolic shapes": """
from torch.fx.experimental.symbolic_shapes import *
import torch.fx.experimental.symbolic_shapes as shapes
print(ShapeEnv is shapes.ShapeEnv and "guard_bool" in dir(shapes) and shapes.__package__ == "torch.fx.experimental")
""",
    "symbolic shapes that are looked at": """
import inspect
import torch.fx.experimental.symbolic_shapes as shapes
inspect.getmodule(gt.randn)
inspect.unwrap(shapes)
print("sympy" not in sys.modules and dir(shapes).index("ShapeEnv") > 0)
""",
    "symbolic shapes that are patched": """
from unittest import mock
import torch.fx.experimental.symbolic_shapes as shapes
with mock.patch.object(shapes, "guard_or_false", lambda truth: "patched"):
    size = shapes.ShapeEnv().create_unbacked_symint()
    patched = shapes.guard_or_false(True)
print(patched == "patched" and shapes.guard_or_false(size == 3) is False)
""",
    "symbolic shapes that fail": """
import torch.fx.experimental.symbolic_shapes as shapes
sys.modules["sympy"] = type(sys)("sympy")
errors = []
for _ in range(2):
    try: shapes.ShapeEnv
    except ImportError as error: errors.append("sympy" in str(error))
del sys.modules["sympy"]
print(errors == [True, True] and shapes.ShapeEnv is not None)
""",
    "inference mode": """
with torch.inference_mode():
    x = gt.ones(2, 2)
    torch.nn.functional.linear(x @ x, x).tolist()
torch.native_dropout(gt.ones(3), 0.5, True)
print(not any(name in sys.modules for name in HEAVY))
""",
    "dynamo on GT tensors": """
w = gt.ones(3, 3)
def f(a): return (torch.nn.functional.gelu(a @ w) * 2 + a.shape[0]).sum()
compiled = torch.compile(f, backend="eager")
print(compiled(gt.ones(2, 3)).item() == f(gt.ones(2, 3)).item())
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
from gt.client.symbolic import _ANSWERS, _Question
assert set(_ANSWERS) == set(CALLS)
assert all(type(vars(shapes)[name]) is _Question for name in CALLS)
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
