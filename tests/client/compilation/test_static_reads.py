"""gt.compile: reads of objects whose own code would answer otherwise."""

import types

from gt.client.compilation.static_reads import (
    attributes_of,
    hides_attributes,
    is_instance,
    is_read_by_getattr,
    module_of,
    slots_of,
)


class Answers:
    """An object that answers every name."""

    __module__ = 5

    def __init__(self):
        object.__setattr__(self, "value", 1)

    def __getattribute__(self, name):
        raise AssertionError(f"code of the program runs: {name}")


class Base:
    __slots__ = ("hidden", "kept")


class Slots(Base):
    hidden = property(lambda self: 2)


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
    assert [hides_attributes(kind) for kind in (Hides, Shows, Both, Base)] == [True, False, False, False]
    assert attributes_of(Hides()) is None
    assert attributes_of(types) is vars(types)


def test_slots_that_getattr_reads():
    slots = slots_of(Slots)
    assert sorted(slots) == ["hidden", "kept"]
    assert is_read_by_getattr(Slots, "kept", slots["kept"])
    assert not is_read_by_getattr(Slots, "hidden", slots["hidden"])
    assert is_read_by_getattr(Base, "hidden", slots["hidden"])
