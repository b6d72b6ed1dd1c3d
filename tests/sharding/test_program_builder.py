"""Moves in a program that is built."""

import pytest

from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.spec_text import parse_spec
from tests.dispatcher.plan_text import MESH, SQUARE


@pytest.mark.parametrize(("copies", "moved"), [((), 32), (("-, tp",), 32), (("-, -",), 0)])
def test_an_input_with_a_copy_in_the_needed_layout_does_not_move(copies, moved):
    source, target = parse_spec("dp, -", MESH), parse_spec("-, -", MESH)
    draft = ProgramBuilder(MESH, [Register(SQUARE, source, tuple([parse_spec(text, MESH) for text in copies]))])
    assert draft.spec(draft.move(0, target)) is target
    assert draft.bytes == moved * 4
