"""The workloads, the peers, and which peer runs which workload in which ways, or why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.comparison import sizes


@dataclass(frozen=True)
class Workload:
    """`unit` is that of the figures, `scale` the factor from seconds (or bytes) to it. Ratios are to the time of the
    variant `baseline`, which runs first. `cases` are the columns of the table, `rounds` how often each variant runs."""

    name: str
    title: str
    unit: str
    scale: float
    cases: tuple[str, ...]
    baseline: str = "torch"
    rounds: int = 2


@dataclass(frozen=True)
class Peer:
    """`module` is the peer's program in `benchmarks/comparison/peers`. It runs in an environment of its own that has
    the `requirements`, or in the project's if there are none."""

    module: str
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A row of a table: a peer on so many workers, in one of its ways. `in_quick`: it runs with --quick too."""

    label: str
    peer: str
    workers: int = 0
    way: str = ""
    in_quick: bool = True


WORKLOADS = {
    each.name: each
    for each in (
        Workload("W1", "Small ops", "us an op", 1e6, ("numbers", "tensors"), rounds=3),
        Workload("W2", "A matrix product", "ms", 1e3, ("product",)),
        Workload("W3", "A step of an MLP", "ms a step", 1e3, ("step",), rounds=3),
        Workload("W4", "A step of a GPT", "ms a step", 1e3, ("step",), rounds=3),
        Workload("W4-growth", "The GPT's depth and batch", "ms a step", 1e3, tuple(sizes.GROWTH)),
        Workload("W5", "256 MB in and out", "ms", 1e3, ("in", "out")),
        Workload("W6", "Start to first result", "s", 1, ("start",)),
        Workload("W7", "One op and a read", "us", 1e6, ("read",)),
        Workload("W8", "A batch whose length changes", "ms a step", 1e3, ("step",)),
        Workload(
            "W9",
            "The dispatcher alone",
            "us of CPU an op",
            1e6,
            tuple(sizes.DISPATCHER_WORKERS),
            baseline="",
            rounds=1,
        ),
        Workload("W10", "Memory of a fully sharded model", "MB a worker", 1e-6, ("peak",), baseline="ideal"),
    )
}

PEERS = {
    "torch": Peer("plain_torch"),
    "gt": Peer("gt_workers"),
    "dispatcher": Peer("dispatcher"),
    "dtensor": Peer("dtensor"),
    "ddp": Peer("ddp"),
    "fsdp2": Peer("fsdp2"),
    "jax": Peer("jax_devices", ("jax==0.10.2",)),
    "dask": Peer("dask_array", ("dask[array]==2026.8.0",)),
    "ray": Peer("ray_actors", ("ray==2.60.0", "numpy")),
}

TORCH = Variant("torch", "torch")
COMPILED = Variant("torch, compiled", "torch", way="compiled", in_quick=False)
EMBEDDED = Variant("GT, embedded", "gt")
GT_2 = Variant("GT, 2 processes", "gt", 2)
GT_DATA = Variant("GT, 2 processes, data parallel", "gt", 2, "data_parallel")
GT_DATA_COMPILED = Variant("GT, 2 processes, data parallel, gt.compile", "gt", 2, "data_parallel compiled")
GT_DATA_INDUCTOR = Variant(
    "GT, 2 processes, data parallel, gt.compile, GT_AUTO_COMPILE", "gt", 2, "data_parallel inductor", in_quick=False
)
DDP = Variant("DDP, 2 processes", "ddp", 2)
JAX_EAGER = Variant("JAX, 2 devices, eager", "jax", 2, "eager")
JAX_JIT = Variant("JAX, 2 devices, jit", "jax", 2, "jit")
DTENSOR = Variant("DTensor, 2 processes", "dtensor", 2)
DASK = Variant("Dask, 2 chunks", "dask", 2)
RAY = Variant("Ray, 2 actors", "ray", 2)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "W1": (
        TORCH, COMPILED, EMBEDDED, GT_2, Variant("GT, 8 processes", "gt", 8, in_quick=False),
        Variant("GT, 2 processes, gt.compile", "gt", 2, "compiled"),
        Variant("GT, 2 processes, gt.compile, GT_AUTO_COMPILE", "gt", 2, "inductor", in_quick=False),
        Variant("DTensor, 1 process", "dtensor", 1, in_quick=False), DTENSOR,
        Variant("DTensor, 8 processes", "dtensor", 8, in_quick=False),
        Variant("JAX, 1 device, eager", "jax", 1, "eager", in_quick=False), JAX_EAGER,
        Variant("JAX, 8 devices, eager", "jax", 8, "eager", in_quick=False),
        Variant("JAX, 2 devices, jit of a link", "jax", 2, "jit"),
        Variant("JAX, 2 devices, jit of the loop", "jax", 2, "jit loop"), DASK, RAY,
    ),
    "W2": (TORCH, EMBEDDED, GT_2, DTENSOR, JAX_EAGER, JAX_JIT, DASK, RAY),
    "W3": (TORCH, COMPILED, EMBEDDED, GT_DATA, GT_DATA_COMPILED, GT_DATA_INDUCTOR, DDP, JAX_EAGER, JAX_JIT),
    "W4": (
        TORCH, COMPILED, EMBEDDED, GT_DATA, GT_DATA_COMPILED, GT_DATA_INDUCTOR,
        Variant("GT, 2 processes, tensor parallel", "gt", 2, "tensor_parallel"),
        Variant("GT, 2 processes, fully sharded", "gt", 2, "fully_sharded"), DDP,
        Variant("DTensor, 2 processes, tensor parallel", "dtensor", 2), Variant("FSDP2, 2 processes", "fsdp2", 2),
        Variant("JAX, 2 devices, eager", "jax", 2, "eager", in_quick=False), JAX_JIT,
    ),
    "W4-growth": tuple(replace(each, in_quick=False) for each in (TORCH, EMBEDDED, GT_DATA, DDP, JAX_JIT)),
    "W5": (TORCH, EMBEDDED, GT_2, DTENSOR, JAX_JIT, DASK, RAY),
    "W6": (TORCH, EMBEDDED, GT_2, JAX_EAGER, DASK, RAY),
    "W7": (TORCH, EMBEDDED, Variant("GT, 1 process", "gt", 1), GT_2, DTENSOR, JAX_EAGER, JAX_JIT, DASK, RAY),
    "W8": (TORCH, COMPILED, EMBEDDED, GT_DATA, DDP, Variant("JAX, 2 devices, jit", "jax", 2, "jit", in_quick=False)),
    "W9": tuple(
        Variant(f"{count} client{'s' * (count > 1)}{way and ', '}{way}", "dispatcher", count, way, in_quick=count < 100)
        for way in ("", "in segments") for count in (1, 10, 100)
    ),
    "W10": (
        Variant("ideal", "torch", 2), Variant("GT, 2 processes, fully sharded", "gt", 2, "fully_sharded"),
        Variant("FSDP2, 2 processes", "fsdp2", 2),
    ),
}  # fmt: skip

NO_GRADIENTS = "has no gradients"
DATA_PARALLEL = "this step is data parallel, which is DDP's"
STARTS_AS_TORCH = "starts as plain torch does, once for each process"
NO_PARTS = "wraps modules for training; it has no tensors that are cut"
# Why a peer has no row in a workload. The dispatcher is a peer of W9 only.
DOES_NOT_APPLY: dict[str, dict[str, str]] = {
    "W1": {"ddp": NO_PARTS, "fsdp2": NO_PARTS},
    "W2": {"ddp": NO_PARTS, "fsdp2": NO_PARTS},
    "W3": {
        "dtensor": DATA_PARALLEL,
        "fsdp2": DATA_PARALLEL,
        "dask": NO_GRADIENTS,
        "ray": NO_GRADIENTS,
    },
    "W4": {"dask": NO_GRADIENTS, "ray": NO_GRADIENTS},
    "W5": {"ddp": NO_PARTS, "fsdp2": NO_PARTS},
    "W6": {
        "dtensor": STARTS_AS_TORCH,
        "ddp": STARTS_AS_TORCH,
        "fsdp2": STARTS_AS_TORCH,
    },
    "W7": {"ddp": NO_PARTS, "fsdp2": NO_PARTS},
    "W8": {
        "dtensor": DATA_PARALLEL,
        "fsdp2": DATA_PARALLEL,
        "dask": NO_GRADIENTS,
        "ray": NO_GRADIENTS,
    },
    "W10": {
        "dtensor": "its fully sharded way is FSDP2",
        "ddp": "every process holds the whole model",
        "jax": "its devices share the memory of one process",
        "dask": NO_GRADIENTS,
        "ray": NO_GRADIENTS,
    },
}


def variants(workload: str, peers: set[str], *, quick: bool) -> list[Variant]:
    return [each for each in VARIANTS[workload] if each.peer in peers and (each.in_quick or not quick)]
