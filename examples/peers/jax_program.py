"""Data-parallel training with JAX on two CPU devices of one process.

pip install jax
python examples/peers/jax_program.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)  # before the first array
mesh = jax.make_mesh((2,), ("dp",))
rows, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
x = jax.device_put(jnp.linspace(-1, 1, 32).reshape(8, 4), rows)
w1 = jax.device_put(jnp.linspace(-0.5, 0.5, 64).reshape(4, 16), whole)
w2 = jax.device_put(jnp.linspace(-0.4, 0.6, 16).reshape(16, 1), whole)


def loss_of(weights, x):
    w1, w2 = weights
    return jnp.square(jnp.tanh(x @ w1) @ w2 - x.sum(1, keepdims=True)).mean()


@jax.jit
def step(weights, x):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


weights = (w1, w2)
for _ in range(5):
    loss, weights = step(weights, x)
    print(f"{loss:.4f}")
print(x.sharding.spec, weights[0].sharding.spec)
