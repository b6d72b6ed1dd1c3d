"""`gt.distributed.matmul` in all the ways that people use it, right and wrong: torch's results, or an error on their
line."""

import traceback

import pytest
import torch

import gt
from gt.core.errors import LayoutError
from gt.sharding.rules.support.product_algorithms import PRODUCT_ALGORITHMS
from gt.sharding.spec import DeviceMesh, ShardingSpec

A, B = torch.randn(12, 10), torch.randn(10, 6)


def operands(left="x, y", right="x, y", values=(A, B)):
    mesh = gt.mesh((2, 4), ("x", "y"))
    return gt.distribute(values[0], mesh, left), gt.distribute(values[1], mesh, right)


def check(found, expected):
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-4, atol=1e-4)


# --- Wrong calls ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda x, y: (y, x), {}, RuntimeError, "same reduction dim"),
        (lambda x, y: (x[0, 0], y), {}, RuntimeError, "at least 1D"),
        (lambda x, y: (x, y.double()), {}, RuntimeError, "same dtype"),
        (lambda x, y: (x.bool(), y.bool()), {}, RuntimeError, "not implemented for 'Bool'"),
        (lambda x, y: (A.tolist(), y), {}, TypeError, "'a' must be a tensor, not list"),
        (lambda x, y: (x, None), {}, TypeError, "'b' must be a tensor, not NoneType"),
        (lambda x, y: (x, y), {"out": "x, y, -"}, LayoutError, "a tensor of 3 dims, and this one has 2"),
        (lambda x, y: (x, y), {"out": [gt.Shard(2), gt.Replicate()]}, LayoutError, "names a dim"),
        (lambda x, y: (x, y), {"out": [gt.Shard(0)]}, LayoutError, "a placement for each of its 2 axes, not 1"),
        (lambda x, y: (x, y), {"out": "z, -"}, LayoutError, "no axis 'z'"),
        (lambda x, y: (x, y), {"out": 17}, LayoutError, "17 is not a placement"),
        (lambda x, y: (x, y), {"out": torch.empty(12, 6)}, LayoutError, "not a tensor to write it to"),
        (lambda x, y: (x, y), {"out": "-, - + x:avg"}, LayoutError, "'avg' is no reduction"),
        (lambda x, y: (x, y), {"mesh": (2, 4)}, LayoutError, "is not a mesh of workers"),
        (lambda x, y: (x, y), {"mesh": DeviceMesh((2,), ("x",), (5, 99))}, LayoutError, r"has workers \[99\]"),
        (lambda x, y: (x, y), {"algo": 3}, LayoutError, "algo=3 is no name"),
        (lambda x, y: (x, y), {"algo": "summa", "panel": -1}, LayoutError, "panel=-1"),
        (lambda x, y: (x, y), {"algo": "summa", "panel": 1.5}, LayoutError, "panel=1.5"),
        (lambda x, y: (x, y), {"bias": torch.ones(5)}, RuntimeError, "must match the size"),
    ],
)
def test_wrong_calls_fail_on_the_users_line(arguments, options, error, message):
    given = arguments(*operands())
    with pytest.raises(error, match=message) as caught:
        gt.distributed.matmul(*given, **options)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__
    check(gt.distributed.matmul(*operands()), A @ B)  # the session goes on


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: gt.distribute(A, mesh, "x, -"),
        lambda mesh: gt.ones(4, mesh=mesh, placements="x"),
        lambda mesh: gt.ones(4).redistribute(mesh, "x"),
        lambda mesh: gt.ones(4).redistribute(placements=ShardingSpec(mesh, [("x",)])),
        lambda mesh: gt.distributed.broadcast(A, mesh=mesh),
        lambda mesh: gt.distributed.send(gt.ones(3), to=99),
        lambda mesh: gt.from_shards([A, A], mesh),
        lambda mesh: gt.open_mesh(mesh).__enter__(),
        lambda mesh: gt.distributed.explain(A, B, mesh=mesh),
    ],
)
def test_a_mesh_of_workers_that_are_not_there(call):
    """A mesh is a value: one of a session before may be given by mistake."""
    with pytest.raises(LayoutError, match=r"has workers \[99\], and there are"):
        call(DeviceMesh((2,), ("x",), (5, 99)))
    assert gt.ones(2).tolist() == [1, 1]


# --- Right calls ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_workers")
def test_a_spec_of_another_mesh_names_the_mesh_of_the_product():
    spec = ShardingSpec(gt.mesh(2, ("z",), (6, 7)), [("z",), ()])
    product = gt.distributed.matmul(*operands(), out=spec)
    assert product.spec is spec
    check(product, A @ B)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", PRODUCT_ALGORITHMS)
def test_every_algorithm_runs_on_one_worker(algo):
    mesh = gt.mesh(1, ("x",))
    check(gt.distributed.matmul(gt.distribute(A, mesh), gt.distribute(B, mesh), algo=algo), A @ B)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 1), (1, 9, 2), (5, 7, 3), (3, 0, 2), (0, 3, 2)])
@pytest.mark.parametrize("mesh", [(3,), (5,), (6,), (7,), (2, 3), (1, 4)])
def test_sizes_smaller_than_odd_grids(mesh, sizes):
    m, k, n = sizes
    grid = gt.mesh(mesh, ("x", "y")[: len(mesh)])
    a, b = torch.randn(m, k), torch.randn(k, n)
    layout = [gt.Shard(dim) for dim in range(len(mesh))]
    x, y = gt.distribute(a, grid, layout), gt.distribute(b, grid, layout)
    for algo in ("gather_a", "gather_b", "inner", "stationary_a", "stationary_b", "stationary_c", "summa", "ring"):
        check(gt.distributed.matmul(x, y, algo=algo), a @ b)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", [None, *PRODUCT_ALGORITHMS])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_of_gradients_by_every_algorithm(algo, needs):
    mesh = gt.mesh((2, 2, 2), ("x", "y", "z")) if algo == "2.5d" else gt.mesh((2, 2), ("x", "y"))
    values = torch.randn(6, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    layouts = ("x, -", "-, y") if algo == "local" else ("x, y", "x, y")
    plain = [value.clone().requires_grad_(need) for value, need in zip(values, needs, strict=True)]
    own = [
        gt.distribute(value, mesh, layout).requires_grad_(need)
        for value, layout, need in zip(values, layouts, needs, strict=True)
    ]
    found, expected = [
        second_gradients(multiply, [each for each in tensors if each.requires_grad], tensors)
        for multiply, tensors in ((lambda a, b: gt.distributed.matmul(a, b, algo=algo), own), (torch.matmul, plain))
    ]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def second_gradients(multiply, inputs, tensors):
    first = torch.autograd.grad((multiply(*tensors) ** 3).sum(), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum((each**2).sum() for each in first), inputs)]


@pytest.mark.usefixtures("eight_workers")
def test_products_under_autocast_have_the_dtype_of_ordinary_ones():
    x, y = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert gt.distributed.matmul(x, y, algo="summa").dtype == (x @ y).dtype == torch.bfloat16
        assert gt.distributed.matmul(x.double(), y.double()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("eight_workers")
def test_products_inside_transforms_are_torchs():
    x, y = operands()
    square = torch.func.grad(lambda a: (gt.distributed.matmul(a, y, out="x, y") ** 2).sum())(x)
    check(square, 2 * (A @ B) @ B.mT)
    _, tangent = torch.func.jvp(lambda a: gt.distributed.matmul(a, y, algo="summa"), (x,), (x,))
    check(tangent, A @ B)
    batch = torch.randn(3, 12, 10)
    moved = gt.distribute(batch, x.spec.mesh, "-, x, y")
    check(torch.func.vmap(lambda a: gt.distributed.matmul(a, y, bias=gt.ones(6)))(moved), batch @ B + 1)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", [None, "summa", "ring"])
def test_a_compiled_function_multiplies_as_asked(algo):
    """Layouts may be read while a call is recorded: they change no value."""
    _, weight = operands()
    compiled = gt.compile(lambda x: (gt.distributed.matmul(x, weight, out="x, y", algo=algo) + 1).relu())
    for turn in range(4):
        x = operands(values=(A * turn, B))[0]
        found = compiled(x)
        assert str(found.spec) == "x, y"
        check(found, (A * turn @ B + 1).relu())


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", [None, "summa", "ring", "inner", "2.5d"])
def test_training_in_a_loop_that_repeats(algo):
    x, weight = operands()
    weight, plain = weight.clone().requires_grad_(), B.clone().requires_grad_()
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in (weight, plain)]
    for _ in range(10):
        losses = [(gt.distributed.matmul(x, weight, algo=algo) ** 2).mean(), ((A @ plain) ** 2).mean()]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    check(weight, plain.detach())


@pytest.mark.usefixtures("eight_workers")
def test_writes_after_a_product():
    x, y = operands()
    product = gt.distributed.matmul(x, y, algo="ring")
    x.add_(1)
    product[0] = 0
    expected = A @ B
    expected[0] = 0
    check(product, expected)
    saved = operands()[0].requires_grad_() * 1
    product = gt.distributed.matmul(saved, y.requires_grad_())
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.usefixtures("eight_workers")
def test_the_backward_of_a_batch_cut_along_any_dim_moves_nothing_and_holds_no_batch_of_weights():
    mesh = gt.mesh((2, 4), ("x", "y"))
    x = gt.distribute(torch.randn(16, 8, 32), mesh, "x, y, -").requires_grad_()
    weight = gt.distribute(torch.randn(32, 48), mesh, "-, -").requires_grad_()
    with gt.debug.comm() as c, gt.debug.memory() as m:
        product = gt.distributed.matmul(x, weight)
        gradients = torch.autograd.grad(product, [x, weight], gt.ones(16, 8, 48, mesh=mesh, placements="x, y, -"))
    assert c.bytes == 0 and [str(each.spec) for each in gradients] == ["x, y, -", "-, - + x y"]
    batch_of_weights = 16 // 2 * 32 * 48 * 4
    assert m.peak < batch_of_weights
    torch.testing.assert_close(
        gradients[1].cpu(), (x.detach().cpu().flatten(0, 1).mT @ torch.ones(128, 48)), rtol=1e-4, atol=1e-4
    )


# --- Explained bytes of operands that are views, share a storage, or have copies --------------------------------------


def used_before(x):
    """A tensor of which other products have made copies."""
    (x @ gt.replicate(torch.ones(16, 4), x.spec.mesh)).spec
    gt.distributed.matmul(x, x, out="-, -").spec
    return x


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("layout", ["x, y", "x, -", "-, x + y", "-, - + x y"])
@pytest.mark.parametrize("options", [{}, {"out": "y, x"}, {"algo": "gather_b"}, {"algo": "summa"}])
@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x, x),
        lambda x, y: (x, x.mT),
        lambda x, y: (x[:8], x[:, 4:12]),
        lambda x, y: (used_before(x).mT, y),
        lambda x, y: (y, used_before(x)[:, 3:]),
        lambda x, y: (x[:1].expand(16, 16), y),
        lambda x, y: (x.view(256).unfold(0, 16, 8), y),
        lambda x, y: (x[:, :1], y[:1]),  # one round of panels
    ],
)
def test_explained_bytes_are_those_counted(make, options, layout):
    value = torch.randn(16, 16)
    given = make(*operands(layout, "y, x", (value, value)))
    plan = gt.distributed.explain(*given, **options)
    with gt.debug.comm() as counted:
        product = gt.distributed.matmul(*given, **options)
        assert str(product.spec) == str(plan.out)
    assert (plan.bytes, plan.pairs) == (counted.bytes, counted.pairs)
    check(product, given[0].cpu() @ given[1].cpu())


FAR = ((3,), ("z",), (1, 2, 7))


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("options", [{}, {"mesh": FAR}, {"mesh": FAR, "out": "z, -", "algo": "inner"}])
@pytest.mark.parametrize(
    ("shape", "layout", "view"),
    [
        ((16,), "x y", lambda x: x.view(2, 8)),
        ((7,), "x", lambda x: x.view(1, 7)),
        ((1, 8), "y, x", lambda x: x.expand(40, 8)),
        ((3, 6, 8), "-, x, -", lambda x: x[1]),
        ((12, 8), "x[0:9 9:12], - + y", lambda x: x[::2]),
    ],
)
def test_explained_bytes_of_views_of_tensors_on_other_meshes(options, shape, layout, view):
    """They are copied first, and the product runs where most bytes of the views are."""
    options = {name: gt.mesh(*value) if name == "mesh" else value for name, value in options.items()}
    mesh, other = gt.mesh((2, 4), ("x", "y")), gt.mesh(2, ("w",), (6, 1))
    value = torch.randn(shape)
    a = view(gt.distribute(value, mesh, ", ".join("-" * len(shape))).redistribute(mesh, layout))
    weight = torch.randn(a.shape[1], a.shape[1])
    b = gt.distribute(weight, other, "w, -")
    for given, expected in [((a, b), view(value) @ weight), ((a, a.mT), view(value) @ view(value).mT)]:
        plan = gt.distributed.explain(*given, **options)
        with gt.debug.comm() as counted:
            product = gt.distributed.matmul(*given, **options)
            assert product.spec is plan.out
        assert (plan.bytes, plan.pairs) == (counted.bytes, counted.pairs)
        check(product, expected)


@pytest.mark.usefixtures("eight_workers")
@pytest.mark.parametrize("algo", [None, "gather_a", "gather_b", "summa"])
def test_a_plain_operand_goes_where_the_other_one_is(algo):
    mesh = gt.mesh(4, ("x",), (4, 5, 6, 7))
    a = gt.distribute(A, mesh, "x, -")
    plan = gt.distributed.explain(a, B, algo=algo)
    with gt.debug.comm() as counted:
        product = gt.distributed.matmul(a, B, algo=algo)
    assert product.spec is plan.out and product.spec.mesh is mesh
    assert (plan.bytes, plan.pairs) == (counted.bytes, counted.pairs)
    check(product, A @ B)
