"""The objects behind methods, partial functions, caches and views, and the functions of a class."""

import functools

import torch

from gt.client.compilation.referred_objects import methods_of, referred_objects


class Layer:
    def plain(self):
        return 1

    @staticmethod
    def static():
        return 2

    @classmethod
    def of_class(cls):
        return 3

    @property
    def size(self):
        return 4

    @size.setter
    def size(self, value):
        self.stored = value

    @torch.no_grad()
    def decorated(self):
        return 5

    number = 6


def test_a_bound_method_refers_to_its_object_and_its_function():
    layer = Layer()
    assert list(referred_objects(layer.plain)) == [layer, Layer.plain]


def test_a_partial_function_refers_to_its_function_and_arguments():
    found = referred_objects(functools.partial(max, 1, key=abs))
    assert list(found) == [max, (1,), {"key": abs}, {}]


def test_a_cache_refers_to_its_function_and_the_table_of_its_results():
    function = functools.partial(int, 7)
    cached = functools.cache(function)
    cached()
    found = referred_objects(cached)
    assert any(each is function for each in found)
    assert any(type(each) is dict and 7 in each.values() for each in found)


def test_a_method_written_in_c_refers_to_its_object_but_not_to_its_module():
    items = [1]
    assert referred_objects(items.append) == (items,)
    assert referred_objects(len) == ()


def test_an_object_with_a_state_of_its_own_refers_to_nothing():
    assert referred_objects(Layer()) is None


def test_the_functions_of_a_class_are_found_behind_descriptors_and_decorators():
    wrapped = Layer.decorated.__wrapped__
    expected = {Layer.plain, Layer.static, vars(Layer)["of_class"].__func__, Layer.size.fget, Layer.size.fset}
    assert set(methods_of(Layer)) == {*expected, Layer.decorated, wrapped}
