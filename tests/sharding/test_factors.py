"""The rule language: texts, and what they say of tensors of given shapes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.core.errors import LayoutError
from gt.sharding.boxes import balanced_cuts
from gt.sharding.factors import (
    HALO,
    MASK,
    PASS,
    REDUCE,
    WHOLE,
    BlockWindow,
    Factor,
    FactorRef,
    HaloWindow,
    PartialPassthrough,
    RuleBuilder,
    Window,
    bind,
    parse_rule,
)

laws = settings(max_examples=100, deadline=None)


def sizes_of(rule):
    return {name: factor.size for name, factor in rule.factors.items()}


# --- Texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("m k, k n -> m n", ((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),)),
        ("(a b) -> a b", ((("a", "b"),),), ((("a",), ("b",)),)),
        ("... i -> ... i", ((("...",), ("i",)),), ((("...",), ("i",)),)),
        ("a 1 -> a", ((("a",), ()),), ((("a",),),)),
        ("a -> a, a", ((("a",),),), ((("a",),), (("a",),))),
        (" -> a", (), ((("a",),),)),
        ("a b ->", ((("a",), ("b",)),), ()),
        ("a, , b -> a", ((("a",),), (), (("b",),)), ((("a",),),)),  # a number among the tensors: no dims
        ("  (a  b)c->c( b a ) ", ((("a", "b"), ("c",)),), ((("c",), ("b", "a")),)),
        ("() a -> a", (((), ("a",)),), ((("a",),),)),
    ],
)
def test_factors_of_dims_are_parsed(text, operands, results):
    template = parse_rule(text)
    assert (template.operands, template.results, template.roles) == (operands, results, {})


@pytest.mark.parametrize(
    ("tail", "roles"),
    [
        ("reduce(sum): k", {"k": (REDUCE, "sum")}),
        ("reduce: k", {"k": (REDUCE, "sum")}),
        ("reduce(max): k m", {"k": (REDUCE, "max"), "m": (REDUCE, "max")}),
        ("whole: k; mask(or): m", {"k": (WHOLE, "sum"), "m": (MASK, "or")}),
        (" halo :k ;", {"k": (HALO, "sum")}),
        ("", {}),
    ],
)
def test_classes_of_factors_are_parsed(tail, roles):
    assert parse_rule(f"m k -> m k | {tail}").roles == roles


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "the rule 'm k, k n' has no '->'"),
        ("(a b -> a b", r"unbalanced parentheses.* in the rule '\(a b -> a b'"),
        ("a b) -> a b", r"unbalanced parentheses in the rule 'a b\) -> a b'"),
        ("((a) b) -> a", "unbalanced parentheses"),
        ("... a ... -> a", r"two '\.\.\.' in one tensor"),
        ("a * -> a", r"cannot read '\*' in the rule 'a \* -> a'"),
        ("a .. -> a", r"cannot read '\.\.'"),
        ("a -> a | sums: a", r"'sums: a' in the rule .* is not of the form 'reduce\(sum\): k'"),
        ("a -> a | reduce(mean): a", r"'reduce\(mean\): a' in the rule"),
        ("a -> a | reduce(sum)", "is not of the form"),
        ("a -> a | reduce(sum):", "is not of the form"),
        ("a -> a | whole: b a c", "the rule 'a -> a | whole: b a c' gives a role to b, c, which no dim has"),
    ],
)
def test_invalid_rule_texts_are_refused(text, message):
    with pytest.raises(LayoutError, match=message.replace(" | ", r" \| ")):
        parse_rule(text)


# --- Rules for shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "given_sizes", "printed", "sizes"),
    [
        # a product
        ("m k, k n -> m n", [(2, 3), (3, 4), (2, 4)], {}, "m k, k n -> m n", {"m": 2, "k": 3, "n": 4}),
        # a dim of several factors: one size follows, the others are given or shown
        ("(a b) -> a b", [(6,), (2, 3)], {}, "(a b) -> a b", {"a": 2, "b": 3}),
        ("(a b) -> (b a)", [(6,), (6,)], {"a": 2}, "(a b) -> (b a)", {"a": 2, "b": 3}),
        ("(a b c) -> b", [(24,), (3,)], {"a": 2}, "(a b c) -> b", {"a": 2, "b": 3, "c": 4}),
        ("(a b) -> a b", [(0,), (0, 3)], {}, "(a b) -> a b", {"a": 0, "b": 3}),
        ("(a b) -> b", [(0,), (0,)], {"a": 2}, "(a b) -> b", {"a": 2, "b": 0}),
        # leading dims, named from the right
        ("... i -> ... i", [(5,), (5,)], {}, "i -> i", {"i": 5}),
        ("... i -> ... i", [(4, 2, 5), (4, 2, 5)], {}, "...1 ...0 i -> ...1 ...0 i", {"...1": 4, "...0": 2, "i": 5}),
        ("... -> ...", [(), ()], {}, " -> ", {}),
        ("..., ... -> ...", [(4, 2), (2,), (4, 2)], {}, "...1 ...0, ...0 -> ...1 ...0", {"...1": 4, "...0": 2}),
        # what is broadcast is not cut
        ("..., ... -> ...", [(4, 1), (3,), (4, 3)], {}, "...1 1, ...0 -> ...1 ...0", {"...1": 4, "...0": 3}),
        ("a b, a b -> a b", [(1, 3), (2, 3), (2, 3)], {}, "1 b, a b -> a b", {"a": 2, "b": 3}),
        ("a b, a b -> a b", [(2, 3), (2, 1), (2, 3)], {}, "a b, a 1 -> a b", {"a": 2, "b": 3}),
        ("a, a -> a", [(1,), (0,), (0,)], {}, "1, a -> a", {"a": 0}),
        ("a, a -> a", [(1,), (1,), (1,)], {}, "a, a -> a", {"a": 1}),
        ("a -> 1", [(3,), (1,)], {}, "a -> 1", {"a": 3}),
        ("a, -> a", [(3,), (), (3,)], {}, "a,  -> a", {"a": 3}),
        # a factor of size 1 within a dim of several cannot be seen, so nothing cuts it anywhere
        ("(a b) -> a b", [(3,), (1, 3)], {}, "b -> 1 b", {"b": 3}),
        ("(a b) -> a b", [(1,), (1, 1)], {}, "1 -> 1 1", {}),
    ],
)
def test_rules_are_bound_to_shapes(text, shapes, given_sizes, printed, sizes):
    count = text.split("->")[0].count(",") + 1
    rule = bind(text, shapes[:count], shapes[count:], given_sizes)
    assert (str(rule), sizes_of(rule)) == (printed, sizes)


def test_classes_of_factors():
    rule = bind("m k, k n -> m n | reduce(sum): k; whole: n", [(2, 3), (3, 4)], [(2, 4)])
    assert rule.factors == {"m": Factor(2, PASS), "k": Factor(3, REDUCE, "sum"), "n": Factor(4, WHOLE)}
    assert str(rule) == "m k, k n -> m n | reduce(sum): k; whole: n"


@pytest.mark.parametrize(
    "text",
    [
        "m k, k n -> m n | reduce(sum): k",
        "(a b) c -> a (b c)",
        "i, v -> i v | halo: i; mask(max): v",
        "1 a -> a 1, a | whole: a",
    ],
)
def test_a_rule_prints_as_it_was_written(text):
    sizes = {"m": 2, "k": 3, "n": 4, "a": 2, "b": 3, "c": 5, "i": 4, "v": 7}
    template = parse_rule(text)
    operands, results = (
        [tuple([math.prod([sizes[name] for name in dim]) for dim in dims]) for dims in side] for side in template[:2]
    )
    rule = bind(text, operands, results, sizes=dict(sizes))
    assert str(rule) == text


def test_passing_values_are_kept_with_the_rule():
    passthroughs = (PartialPassthrough(frozenset({0}), "max", "min"),)
    assert bind("a -> a", [(3,)], [(3,)], passthroughs=passthroughs).passthroughs == passthroughs


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("m k, k n -> m n", [(2, 3)], [(2, 4)], "'m k, k n -> m n' is not one of 1 operands and 1 results"),
        ("a -> a", [(3,), (3,)], [], "is not one of 2 operands and 0 results"),
        ("a -> a", [], [(3,), (3,)], "is not one of 0 operands and 2 results"),
        ("a b -> a", [(3,)], [(3,)], r"a tensor of shape \(3,\) does not fit the rule 'a b -> a'"),
        ("a -> a", [(3, 4)], [(3,)], r"a tensor of shape \(3, 4\) does not fit the rule 'a -> a'"),
        ("... a b -> a b", [(3,)], [(3, 4)], r"a tensor of shape \(3,\) does not fit the rule '\.\.\. a b -> a b'"),
        ("m k, k n -> m n", [(2, 3), (4, 5)], [(2, 5)], "factor k of the rule .* is 3 in one tensor and 4 in another"),
        ("a, a -> a", [(2,), (2,)], [(3,)], "factor a of the rule .* is 2 in one tensor and 3 in another"),
        ("(a b) -> a", [(7,)], [(2,)], r"\(a b\) of the rule .* does not make a dim of size 7"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "the sizes of a, b in the rule .* have to be given"),
        ("(a b) -> a b", [(6,)], [(2, 4)], r"\(a b\) of the rule .* does not make a dim of size 6"),
    ],
)
def test_shapes_that_do_not_fit(text, operands, results, message):
    with pytest.raises(LayoutError, match=message):
        bind(text, operands, results)


def test_binding_does_not_change_what_is_given():
    sizes = {"a": 2}
    for length in (6, 8):
        assert sizes_of(bind("(a b) -> (b a)", [(length,)], [(length,)], sizes))["b"] == length // 2
    assert sizes == {"a": 2}


def test_rules_can_be_built_without_text():
    builder = RuleBuilder()
    row, col = builder.factor("row", 4), builder.factor("col", 6, REDUCE, "max")
    builder.operands.append(((FactorRef(row),), (FactorRef(col, Window(1, 5)),)))
    builder.results.append(((FactorRef(row),),))
    rule = builder.build()
    assert str(rule) == "row col -> row | reduce(max): col"
    assert rule.operands[0][1][0].window == Window(1, 5)


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "cuts", "shown"),
    [
        (Window(0, 8), ((0, 3), (3, 8)), ((0, 3), (3, 8))),
        (Window(2, 4), ((0, 3), (3, 8)), ((0, 1), (1, 4))),
        (Window(5, 3), ((0, 3), (3, 8)), ((0, 0), (0, 3))),  # the first shard shows nothing
        (Window(1, 3, 3), ((0, 4), (4, 9)), ((0, 1), (1, 3))),  # 1 | 4, 7
        (Window(0, 0), ((0, 3), (3, 8)), ((0, 0), (0, 0))),
    ],
)
def test_windows_show_some_elements_of_a_factor(window, cuts, shown):
    assert window.cuts(cuts) == shown


@given(st.integers(0, 8), st.integers(0, 6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 5))
@laws
def test_a_window_is_cut_where_its_elements_are(offset, size, step, rest, count):
    positions = [offset + i * step for i in range(size)]
    factor = balanced_cuts(max([offset, *[position + 1 for position in positions]]) + rest, (count,))
    shown = Window(offset, size, step).cuts(factor)
    for (start, stop), (first, last) in zip(factor, shown, strict=True):
        assert positions[first:last] == [position for position in positions if start <= position < stop]
        assert 0 <= first <= last <= size


@given(
    st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 12), st.integers(0, 9), st.integers(1, 4)
)
@laws
def test_a_halo_window_has_exactly_the_elements_that_a_shard_needs(stride, before, after, size, outputs, count):
    cuts = balanced_cuts(outputs, (count,))
    for (start, stop), (low, high) in zip(cuts, HaloWindow(stride, before, after, size).cuts(cuts), strict=True):
        asked = {o * stride + by for o in range(start, stop) for by in range(-before, after + 1)}
        between = range(min(asked, default=0), max(asked, default=-1) + 1)
        assert list(range(low, high)) == [position for position in between if 0 <= position < size]
        assert 0 <= low <= high <= size


@pytest.mark.parametrize(
    ("cuts", "parts"),
    [
        (((0, 3), (3, 6), (6, 8), (8, 10)), ((0, 1), (1, 2), (2, 3), (3, 4))),
        (((0, 6), (6, 10)), ((0, 2), (2, 4))),  # two blocks each
        (((0, 10),), ((0, 4),)),
        (((0, 5), (5, 10)), None),  # in the middle of a block
        (((0, 3), (3, 10)), None),  # not equally many
        (((0, 3), (3, 6), (6, 10)), None),
        (((0, 2), (2, 3), (3, 6), (6, 8), (8, 10)), None),  # more shards than blocks
    ],
)
def test_blocks_are_not_divided(cuts, parts):
    blocks = BlockWindow(((0, 3), (3, 6), (6, 8), (8, 10)), ((0, 1), (1, 2), (2, 3), (3, 4)))
    assert blocks.cuts(cuts) == parts


def test_an_odd_number_of_blocks_is_not_divided_in_two():
    assert BlockWindow(((0, 2), (2, 4), (4, 6)), ((0, 1), (1, 2), (2, 3))).cuts(((0, 4), (4, 6))) is None
