"""gt.compile: reads of objects whose own code would answer otherwise."""

import types

from gt.client.compilation.static_reads import attributes_of, is_instance, module_of


class Answers:
    """An object that answers every name."""

    __module__ = 5

    def __init__(self):
        object.__setattr__(self, "value", 1)

    def __getattribute__(self, name):
        raise AssertionError(f"code of the program runs: {name}")


def test_type_and_attributes_of_an_object_that_answers_every_name():
    value = Answers()
    assert is_instance(value, (int, Answers))
    assert not is_instance(value, (int, type))
    assert attributes_of(value) == {"value": 1}
    assert module_of(Answers) == ""


def test_attributes_behind_a_property():
    class Hides:
        __dict__ = property(lambda self: {"other": 1})

    class Shows:
        pass

    class Both(Hides, Shows):
        pass

    value = Both()
    value.own = 3
    assert attributes_of(value) == {"own": 3}
    assert attributes_of(Hides()) is None
    assert attributes_of(types) is vars(types)
