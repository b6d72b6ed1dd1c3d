"""The models of the workloads in JAX, with AdamW and SGD written out: sizes and formulas are those of torch_models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparison import sizes
from benchmarks.comparison.sizes import Transformer

Tree = Any  # a nest of dicts and lists of arrays
BETAS, EPSILON, DECAY, RATE = (0.9, 0.999), 1e-8, 0.01, 1e-3


def linear(random: np.random.Generator, inputs: int, outputs: int) -> Tree:
    weight = random.standard_normal((inputs, outputs), np.float32) / np.float32(inputs**0.5)
    return {"weight": weight, "bias": np.zeros(outputs, np.float32)}


def apply(layer: Tree, x: jax.Array) -> jax.Array:
    return x @ layer["weight"] + layer["bias"]


def mlp(random: np.random.Generator) -> Tree:
    return [linear(random, *widths) for widths in zip(sizes.MLP_WIDTHS, sizes.MLP_WIDTHS[1:], strict=False)]


def run_mlp(layers: Tree, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(apply(layer, x))
    return apply(layers[-1], x)


def mlp_batch(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = random.standard_normal((sizes.MLP_BATCH, sizes.MLP_WIDTHS[0]), np.float32)
    return x, random.integers(0, sizes.MLP_WIDTHS[-1], (sizes.MLP_BATCH,))


def norm_parameters(width: int) -> Tree:
    return {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}


def norm(layer: Tree, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * layer["weight"] + layer["bias"]


def gpt(random: np.random.Generator, size: Transformer) -> Tree:
    width = size.width

    def layer() -> Tree:
        attention = {name: linear(random, width, width) for name in ("query", "key", "value", "out")}
        feed_forward = {"widen": linear(random, width, 4 * width), "narrow": linear(random, 4 * width, width)}
        return attention | feed_forward | {"norm1": norm_parameters(width), "norm2": norm_parameters(width)}

    return {
        "tokens": random.standard_normal((size.vocabulary, width), np.float32),
        "positions": random.standard_normal((size.length, width), np.float32),
        "layers": [layer() for _ in range(size.layers)],
        "norm": norm_parameters(width),
        "head": random.standard_normal((width, size.vocabulary), np.float32) / np.float32(width**0.5),
    }


def attend(layer: Tree, x: jax.Array, heads: int) -> jax.Array:
    q, k, v = (apply(layer[name], x).reshape(*x.shape[:2], heads, -1) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # (B, T, H, D)
    return apply(layer["out"], mixed.reshape(x.shape))


def run_gpt(model: Tree, ids: jax.Array, heads: int) -> jax.Array:
    x = model["tokens"][ids] + model["positions"][: ids.shape[1]]
    for layer in model["layers"]:
        x = x + attend(layer, norm(layer["norm1"], x), heads)
        x = x + apply(layer["narrow"], jax.nn.gelu(apply(layer["widen"], norm(layer["norm2"], x))))
    return norm(model["norm"], x) @ model["head"]  # (B, T, vocabulary)


def gpt_batch(random: np.random.Generator, size: Transformer) -> tuple[np.ndarray, np.ndarray]:
    ids = random.integers(0, size.vocabulary, (size.batch, size.length + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def sgd_step(forward: Callable[[Tree, jax.Array], jax.Array]) -> Callable[..., tuple[jax.Array, Tree]]:
    def step(model: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
        loss, gradients = jax.value_and_grad(lambda model: cross_entropy(forward(model, x), y))(model)
        return loss, jax.tree.map(lambda p, g: p - 0.01 * g, model, gradients)

    return step


def adamw_state(model: Tree) -> Tree:
    zeros = jax.tree.map(jnp.zeros_like, model)
    return {"model": model, "first": zeros, "second": jax.tree.map(jnp.zeros_like, model), "steps": jnp.zeros(())}


def adamw_step(forward: Callable[[Tree, jax.Array], jax.Array]) -> Callable[..., tuple[jax.Array, Tree]]:
    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
        loss, gradients = jax.value_and_grad(lambda model: cross_entropy(forward(model, x), y))(state["model"])
        steps = state["steps"] + 1
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, state["second"], gradients)

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1 - BETAS[0] ** steps), v / (1 - BETAS[1] ** steps)
            return p * (1 - RATE * DECAY) - RATE * m / (jnp.sqrt(v) + EPSILON)

        model = jax.tree.map(update, state["model"], first, second)
        return loss, {"model": model, "first": first, "second": second, "steps": steps}

    return step
