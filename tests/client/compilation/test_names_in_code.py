"""The names that are found in the code of a function: what it may read, import and set."""

import pytest

from gt.client.compilation.names_in_code import SHOWING, absolute_name, is_implicit, names_in

RATE = 0.5


def names(function):
    return names_in(function.__code__)


def test_globals_attributes_and_texts_are_words_and_only_globals_are_globals():
    found = names(lambda model: model.scale * RATE + model.table["key"])
    assert {"RATE", "scale", "table", "key"} <= found.words
    assert found.globals == {"RATE"}


def test_names_of_functions_inside_are_names_of_the_function():
    def outer(model):
        return [lambda: model.inner * RATE]

    assert "inner" in names(outer).words
    assert names(outer).globals == {"RATE"}


def test_imports_are_found_with_their_levels():
    code = compile("import math\nfrom . import sibling\nfrom ..package import thing\n", "a file", "exec")
    assert names_in(code).imports == {("math", 0), ("", 1), ("package", 2)}


@pytest.mark.parametrize(
    ("function", "reads_all"),
    [
        (lambda model: model.scale, False),
        (lambda model: getattr(model, "scale"), False),  # noqa: B009
        (lambda model, name: getattr(model, name), True),
        (lambda model: vars(model), True),
        (lambda model: model.__dict__, True),
        (lambda model, name: [getattr(each, name) for each in model], True),
    ],
)
def test_attributes_whose_names_are_not_in_the_code(function, reads_all):
    assert names(function).reads_all is reads_all


def test_new_attributes_are_those_that_are_only_set_on_the_first_argument():
    def make(self, other):
        self.fresh = 1
        self.used = 2
        other.foreign = 3
        return self.used

    assert names(make).new_attributes == {"fresh"}


def test_texts_of_objects_use_their_special_methods_unless_they_are_of_errors():
    def shows(value):
        return f"{value}"

    def raises(value):
        raise ValueError(f"{value} is wrong")

    assert names(shows).words >= SHOWING
    assert not names(raises).words & SHOWING


def test_patterns_of_classes_use_their_match_args():
    def matches(value):
        match value:
            case complex(real=1):
                return True
        return False

    assert "__match_args__" in names(matches).words


@pytest.mark.parametrize(
    ("module", "level", "expected"),
    [("a.b", 0, "a.b"), ("b", 1, "top.middle.b"), ("", 1, "top.middle"), ("b", 2, "top.b")],
)
def test_relative_imports_are_of_the_package_of_the_globals(module, level, expected):
    assert absolute_name(module, level, {"__package__": "top.middle", "__name__": "top.middle.file"}) == expected
    assert absolute_name(module, level, {"__name__": "top.middle.file"}) == expected


def test_operators_are_called_without_being_named_and_constructors_are_not():
    assert is_implicit("__add__", is_class=True) and is_implicit("forward", is_class=True)
    assert not is_implicit("__init__", is_class=True) and not is_implicit("scale", is_class=True)


def test_special_methods_of_classes_are_called_and_special_attributes_of_objects_and_modules_are_not():
    assert not is_implicit("__builtins__", is_class=False) and not is_implicit("__add__", is_class=False)
    assert is_implicit("__getattr__", is_class=False) and is_implicit("forward", is_class=False)
