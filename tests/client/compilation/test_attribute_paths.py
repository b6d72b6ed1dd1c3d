"""gt.compile: the dotted names in the code of a function."""

import os

from gt.client.compilation.attribute_paths import Root, paths_in

MODULE = os


def found_in(function):
    return {(path.root, str(path)) for path in paths_in(function.__code__)}


def test_globals_and_variables_of_enclosing_functions():
    free = os

    def function():
        return MODULE.path.join, free.getcwd()

    assert found_in(function) >= {(Root.GLOBAL, "MODULE.path.join"), (Root.FREE, "free.getcwd")}


def test_local_names_stand_for_what_they_are_assigned():
    def function():
        for _ in range(2):
            found = path.join if _ else None  # noqa: F821, F841
            path = MODULE.path  # noqa: F841

    assert (Root.GLOBAL, "MODULE.path.join") in found_in(function)


def test_modules_that_the_function_imports():
    def function():
        import os.path as other  # noqa: PLC0415
        import xml.dom  # noqa: PLC0415
        from collections.abc import Sized as kind  # noqa: N813, PLC0415

        return other.join, xml.dom.Node, kind.register

    assert found_in(function) >= {
        (Root.MODULE, "os.path.join"),
        (Root.MODULE, "xml.dom.Node"),
        (Root.MODULE, "collections.abc.Sized.register"),
    }


def test_names_in_functions_inside():
    def function():
        found = MODULE.path
        return lambda: (found.join, MODULE.sep)

    assert found_in(function) >= {(Root.GLOBAL, "MODULE.path.join"), (Root.GLOBAL, "MODULE.sep")}


def test_lines():
    def function():
        return MODULE.sep

    lines = {path.line for path in paths_in(function.__code__) if str(path) == "MODULE.sep"}
    assert lines == {function.__code__.co_firstlineno + 1}
