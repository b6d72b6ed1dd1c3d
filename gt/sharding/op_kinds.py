"""The kind of work that an op is, for people who look at many ops at once: from the family of rules that it is in."""

from __future__ import annotations

import functools

from gt.sharding.rules import TABLES, functional_name
from gt.sharding.rules.attention import ATTENTION
from gt.sharding.rules.cat_split import CAT_SPLIT
from gt.sharding.rules.convolution import CONVOLUTION
from gt.sharding.rules.creation import CREATION
from gt.sharding.rules.diagonal import DIAGONAL
from gt.sharding.rules.embedding import EMBEDDING
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.fft import FFT
from gt.sharding.rules.indexing import ADVANCED_INDEXING, INDEXING
from gt.sharding.rules.linalg import LINALG
from gt.sharding.rules.matmul import GROUPED_MM, MATMUL
from gt.sharding.rules.norms import DISTANCE
from gt.sharding.rules.optimizers import OPTIMIZERS
from gt.sharding.rules.pointwise import POINTWISE
from gt.sharding.rules.scatter import MASKED_SCATTER, SCATTER
from gt.sharding.rules.slicing import SLICING
from gt.sharding.rules.views import VIEWS
from gt.sharding.rules.vision import VISION

CONTRACTION, POINTWISE_OP, REDUCTION_OP = "contraction", "pointwise", "reduction"
MOVEMENT, CREATION_OP, OPTIMIZER, OTHER = "movement", "creation", "optimizer", "other"

_FAMILIES: dict[str, tuple[dict[str, OpEntry], ...]] = {
    CONTRACTION: (MATMUL, GROUPED_MM, ATTENTION, CONVOLUTION, DISTANCE, LINALG, FFT),
    POINTWISE_OP: (POINTWISE,),
    MOVEMENT: (
        VIEWS, SLICING, DIAGONAL, CAT_SPLIT, INDEXING, ADVANCED_INDEXING, SCATTER, MASKED_SCATTER, EMBEDDING, VISION,
    ),
    CREATION_OP: (CREATION,),
    OPTIMIZER: (OPTIMIZERS,),
}  # fmt: skip
_KINDS = {id(table): kind for kind, tables in _FAMILIES.items() for table in tables}
# All other families give one result for many elements: norms, softmax, losses, pooling, sorting, running sums.
_KIND_OF_OP = {op: _KINDS.get(id(table), REDUCTION_OP) for table in TABLES for op in table}


@functools.lru_cache(maxsize=1 << 12)  # programs choose the names
def op_kind(op: str) -> str:
    """The kind of an overload such as `aten.mm.default`; `other` if no rule is known of it."""
    names = (op, op.rpartition(".")[0], functional_name(op)) if "." in op else ()
    return next((_KIND_OF_OP[name] for name in names if name in _KIND_OF_OP), OTHER)
