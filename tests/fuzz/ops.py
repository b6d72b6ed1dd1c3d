"""The pool of ops of random programs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz import elementwise_ops, layer_ops, shape_ops
from tests.fuzz.op_table import Op

POOL: dict[str, Op] = {**elementwise_ops.OPS, **shape_ops.OPS, **layer_ops.OPS}


def pick(chance: random.Random, names: Sequence[str]) -> Op:
    return POOL[chance.choice(names)]
