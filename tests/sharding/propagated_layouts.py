"""Runs the trace of a program through propagation, and prints the layouts that are found."""

from gt.sharding.hierarchical_propagation import Propagation, run_hierarchical_propagation_pass
from gt.sharding.program_trace import ProgramTrace
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_constraint
from tests.sharding.recording import record

MESH = DeviceMesh((2, 4), ("x", "y"))
GRID = DeviceMesh((2, 4), ("dp", "tp"))


def run(program: ProgramTrace, asked: dict[str, str], eagerness: str = "aggressive", mesh=MESH) -> Propagation:
    constraints = {value: parse_constraint(text, mesh) for value, text in asked.items()}
    return run_hierarchical_propagation_pass(program, mesh, constraints, eagerness)


def found(program: ProgramTrace, asked: dict[str, str], eagerness: str = "aggressive", mesh=MESH) -> dict[str, str]:
    """The axes of every value, as text."""
    layouts = run(program, asked, eagerness, mesh).layouts
    return {value: str(layout).replace("?", "") for value, layout in layouts.items()}


def product(a: tuple[int, int], b: tuple[int, int]) -> ProgramTrace:
    return record(lambda a, b: a @ b, a=a, b=b)
