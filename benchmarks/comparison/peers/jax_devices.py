"""JAX on several CPU devices of one process: op by op (eager), and with `jax.jit`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.comparison import sizes
from benchmarks.comparison.peers import jax_models as models
from benchmarks.comparison.peers.command import Case, Cases, Request, run_peer, sample, sample_programs
from benchmarks.comparison.sizes import GPT, Transformer

CHANGING_STEPS, COMPILED_CHANGING_STEPS = 40, 4  # each length is compiled anew, which takes seconds
RANDOM = np.random.default_rng(0)


class Devices:
    """The devices of a request, and the two layouts that are used on them."""

    def __init__(self, request: Request) -> None:
        if request.way == "eager":
            # XLA's threads. With as few as cores they may all wait in collectives of different ops, for ever.
            os.environ.setdefault("NPROC", str(8 * request.workers))
        jax.config.update("jax_num_cpu_devices", request.workers)
        mesh = Mesh(jax.devices(), ("all",))
        self._rows, self._whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())

    def cut(self, x: Any) -> Any:
        return jax.device_put(x, self._rows)

    def whole(self, tree: Any) -> Any:
        return jax.device_put(tree, self._whole)


def link(x: jax.Array, factor: jax.Array | float, addend: jax.Array | float) -> jax.Array:
    x = x * factor
    return x + addend


def chain(request: Request) -> Cases:
    """Eager, with each link compiled ("jit"), and with the whole loop compiled ("jit loop")."""
    devices, parts = Devices(request), 2 * sizes.CHAIN_LINKS
    run_link = link if request.way == "eager" else jax.jit(link)

    def run(x: jax.Array, factor: jax.Array | float, addend: jax.Array | float) -> jax.Array:
        for _ in range(sizes.CHAIN_LINKS):
            x = run_link(x, factor, addend)
        return x

    def loop(x: jax.Array, factor: jax.Array | float, addend: jax.Array | float) -> jax.Array:
        return jax.lax.fori_loop(0, sizes.CHAIN_LINKS, lambda _, y: link(y, factor, addend), x)

    shape = (sizes.CHAIN_SIZE, sizes.CHAIN_SIZE)
    x = devices.cut(RANDOM.random(shape, np.float32))
    tensors = [devices.cut(np.full(shape, number, np.float32)) for number in (sizes.FACTOR, sizes.ADDEND)]
    function = jax.jit(loop) if request.way == "jit loop" else run
    cases = {}
    for name, operands in (("numbers", [sizes.FACTOR, sizes.ADDEND]), ("tensors", tensors)):
        step = lambda: np.asarray(function(x, *operands))[0, 0]
        cases[name] = Case(sample(step, request.budget, parts=parts))
    return cases


def product(request: Request) -> Cases:
    devices = Devices(request)
    a = devices.cut(RANDOM.random((sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER), np.float32))
    b = devices.whole(RANDOM.random((sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS), np.float32))
    multiply = compiled(lambda a, b: a @ b, request)
    return {"product": Case(sample(lambda: multiply(a, b).block_until_ready(), request.budget))}


def compiled(function: Callable[..., Any], request: Request) -> Callable[..., Any]:
    return function if request.way == "eager" else jax.jit(function)


def trainer(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], float]:
    def run() -> float:
        nonlocal state
        loss, state = step(state, *batch)
        return float(loss)

    return run


def mlp(request: Request) -> Cases:
    devices = Devices(request)
    step = compiled(models.sgd_step(models.run_mlp), request)
    model, batch = devices.whole(models.mlp(RANDOM)), devices.cut(models.mlp_batch(RANDOM))
    return {"step": Case(sample(trainer(step, model, batch), request.budget))}


def gpt_step(size: Transformer, devices: Devices, request: Request) -> Case:
    step = compiled(models.adamw_step(lambda model, ids: models.run_gpt(model, ids, size.heads)), request)
    state = devices.whole(models.adamw_state(models.gpt(RANDOM, size)))
    batch = devices.cut(models.gpt_batch(RANDOM, size))
    return Case(sample(trainer(step, state, batch), request.budget))


def gpt(request: Request) -> Cases:
    return {"step": gpt_step(GPT, Devices(request), request)}


def growth(request: Request) -> Cases:
    devices = Devices(request)
    return {name: gpt_step(size, devices, request) for name, size in sizes.GROWTH.items()}


def transfer(request: Request) -> Cases:
    """The way out joins the shards, which is a copy: a shard alone can be seen where it is."""
    devices = Devices(request)
    x = np.ones(sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS, np.float32)
    cut = devices.cut(x).block_until_ready()
    upload = lambda: devices.cut(x).block_until_ready()
    download = lambda: np.concatenate([np.asarray(shard.data) for shard in cut.addressable_shards])
    return {"in": Case(sample(upload, request.budget)), "out": Case(sample(download, request.budget))}


def start(request: Request) -> Cases:
    program = (
        f"import jax; jax.config.update('jax_num_cpu_devices', {request.workers})\n"
        "import jax.numpy as jnp; print((jnp.ones(2) + 1).sum().item(), flush=True)"
    )
    return {"start": Case(sample_programs(program, 1 if request.quick else 2))}


def read(request: Request) -> Cases:
    x = Devices(request).cut(np.ones(sizes.CHAIN_SIZE, np.float32))
    add = compiled(lambda x: x.sum(), request)
    step = lambda: [add(x).item() for _ in range(20)]
    return {"read": Case(sample(step, request.budget, parts=20))}


def changing_batch(request: Request) -> Cases:
    devices = Devices(request)
    step = compiled(models.adamw_step(lambda model, ids: models.run_gpt(model, ids, GPT.heads)), request)
    state = devices.whole(models.adamw_state(models.gpt(RANDOM, GPT)))
    ids, targets = models.gpt_batch(RANDOM, GPT)
    lengths = iter(sizes.changing_lengths())

    def run() -> float:
        nonlocal state
        length = next(lengths)
        loss, state = step(state, devices.cut(ids[:, :length]), devices.cut(targets[:, :length]))
        return float(loss)

    most = CHANGING_STEPS if request.way == "eager" else COMPILED_CHANGING_STEPS
    return {"step": Case(sample(run, request.budget, agree=lambda count: min(count, most)))}


MEASURES = {
    "W1": chain,
    "W2": product,
    "W3": mlp,
    "W4": gpt,
    "W4-growth": growth,
    "W5": transfer,
    "W6": start,
    "W7": read,
    "W8": changing_batch,
}

if __name__ == "__main__":
    run_peer(MEASURES, {"jax": jax.__version__})
