"""The instruction stream of a few steps of a program, as its client sent it, with the modules that the steps went
through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gt.core.messages import Instruction, Queried
from gt.core.meta import TensorMeta
from gt.core.signatures import PolicyRecord, Signature, ViewStep
from gt.sharding.spec import ShardingSpec

ENTER, LEAVE, INPUT, OUTPUT, GRADIENT = "enter", "leave", "input", "output", "gradient"


class ModuleMark(NamedTuple):
    """A point of the stream, before the instruction at `position`, at which something happened to a module.

    - `kind`: the module begins or ends its forward (enter, leave); the tensor `ident`, or the view of it that `view`
      makes, is an input of the model (input), a result of the module (output), or the gradient of a result (gradient)
    - `meta`: that of the input, result or gradient
    - `dead`: the tensors that are freed if an instruction is sent here
    """

    position: int
    kind: str
    module: str
    ident: int = 0
    view: tuple[ViewStep, ...] = ()
    meta: TensorMeta | None = None
    dead: tuple[int, ...] = ()


class RecordedSteps(NamedTuple):
    """Some steps of a program, which are the same but for their scalars. `starts` are the positions of their first
    instructions, and `mark_starts` the numbers of their first marks: one step may end where the next one begins.

    - `signatures`: the ops, by id
    - `metas`: the tensors that the stream names, by id
    - `layouts`: those that some tensors had before the first step, by id
    - `parameters`: the ids of parameters and buffers before the first step, by name; tied ones have several names
    - `states`: the ids of an optimizer's state that existed before, with the ids of the parameters that they belong to
    - `owners`: the modules that have their own parameters and buffers, with the names of these
    - `sites`: lines of the program, by id
    - `scopes`: signal scopes, by id: the name and the policy
    - `answers`: those of the queries, by request
    """

    instructions: tuple[Instruction, ...]
    starts: tuple[int, ...]
    mark_starts: tuple[int, ...]
    marks: tuple[ModuleMark, ...]
    signatures: Mapping[int, Signature]
    metas: Mapping[int, TensorMeta]
    layouts: Mapping[int, ShardingSpec]
    parameters: Mapping[str, int]
    states: Mapping[int, int]
    owners: Mapping[str, tuple[str, ...]]
    sites: Mapping[int, str]
    scopes: Mapping[int, tuple[str, PolicyRecord | None]]
    answers: Mapping[int, Queried]
