"""The strategies that were considered for a call, for people: what was chosen, what else was possible, and its bytes.

A program builder that is asked to note its calls keeps a `NotedCall` of each; all strategies are worked out from it
afterwards, so that a plan which nobody looks at costs nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gt.sharding.constraints import Target
from gt.sharding.lowering import all_strategies
from gt.sharding.op_calls import OpCall
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpStrategy
from gt.sharding.strategy_choice import Choice, RankedChoice

_BROADCAST_DIMS = re.compile(r"\.\.\.\d+( \.\.\.\d+)*")


class NotedCall(NamedTuple):
    """A call of a program with the layouts of its inputs and of their copies, the targets of its results, and the
    strategy that was chosen."""

    call: OpCall
    specs: tuple[ShardingSpec, ...]
    copies: tuple[tuple[ShardingSpec, ...], ...]
    targets: tuple[Target, ...]
    reduces_first: bool
    choice: Choice


class StrategyOption(NamedTuple):
    """A strategy as text: the axes that cut its factors, such as `m=dp, k=tp`, and its layouts. `bytes` move for it
    now, and `later` ones for its results, as far as that is foreseeable. With `ignores_scope` its results are not laid
    out as the scope asks."""

    factors: str
    layouts: str
    bytes: int
    later: int = 0
    ignores_scope: bool = False


class ConsideredCall(NamedTuple):
    """A call, its rule as text ("" if it has none), the chosen strategy, and all others in the order of preference."""

    op: str
    rule: str
    chosen: StrategyOption
    others: tuple[StrategyOption, ...]


def consider(noted: NotedCall, mesh: DeviceMesh) -> ConsideredCall:
    """Work out all strategies of a call that was noted."""
    call, specs, copies, targets, reduces_first, choice = noted
    found = all_strategies(call, specs, mesh, targets, copies, reduces_first)
    chosen = print_option(RankedChoice(choice, 0, 0))
    if found is None:
        return ConsideredCall(call.op, "", chosen, ())
    options = list(dict.fromkeys(map(print_option, found.choices)))
    same = [option for option in options if option[:3] == chosen[:3]]
    others = [option for option in options if option not in same]
    return ConsideredCall(call.op, print_rule(str(found.rule)), (same or [chosen])[0], tuple(others))


def print_option(ranked: RankedChoice) -> StrategyOption:
    (strategy, nbytes), later, constraint_rank = ranked
    layouts = print_layouts(strategy.operands, strategy.results)
    return StrategyOption(_print_factors(strategy), layouts, nbytes, later, constraint_rank > 1)


def _print_factors(strategy: OpStrategy) -> str:
    cut = [f"{name}={' '.join(sharding.axes)}" for name, sharding in strategy.assignment.items() if sharding.axes]
    if cut:
        return ", ".join(cut)
    return "partial values pass" if any(spec.partial for spec in strategy.operands) else "nothing is cut"


def print_layouts(operands: tuple[ShardingSpec, ...], results: tuple[ShardingSpec, ...]) -> str:
    """Layouts of operands and results as text: `[dp, -] [-, tp] -> [dp, tp]`."""
    return " -> ".join([" ".join([f"[{spec}]" for spec in specs]) or "nothing" for specs in (operands, results)])


def print_rule(rule: str) -> str:
    """A rule with `...` in place of the dims that it stands for, as the rule is written in the table of rules."""
    return _BROADCAST_DIMS.sub("...", rule)
