"""gt.compile: a function that uses state outside of its arguments. Whatever changes, and when, GT looks at it and calls
do what the code would do; or a check finds it, names the line, and tells how many results may be wrong."""

import abc
import array
import collections
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import logging
import math
import operator
import os
import queue
import random
import re
import sys
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import gt

CALLS, CHANGED_AT = 16, 7
GLOBAL = 1.0
ACTIVATION = torch.neg


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


def case_of(cases):
    def add(make):
        cases[make.__name__] = make
        return make

    return add


def calls_of(make, check_every=None):
    """The results of calls of the function that `make` gives, with the change that it gives in between, and the errors
    of checks, by the numbers of calls. Compiled, if `check_every` is given."""
    function, change = make()
    called = gt.compile(function, check_every=check_every) if check_every else function
    results, errors = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(CALLS):
            if number >= CHANGED_AT:
                change(float(number - CHANGED_AT + 2 if number < CHANGED_AT + 3 else 4))
            try:
                results.append(called(gt.ones(1)).item())
            except gt.CompileError as error:
                results.append(None)
                errors[number] = str(error)
    return results, errors, called


# Values that are the same in the first calls and change later: GT looks at them in each call, or a check finds them

LOOKED_AT, FOUND = {}, {}
looked_at, found_by_a_check = case_of(LOOKED_AT), case_of(FOUND)


def new_class():
    """A class that no other case changes."""

    class Config:
        value = 1.0

    return Config


def scaled_by(config, changed=None):
    """A function that reads an attribute, and a change of the attribute, or of that of another object."""
    return lambda x: x * config.value, lambda v: setattr(changed or config, "value", v)


@looked_at
def class_attribute():
    return scaled_by(new_class())


@found_by_a_check
def class_attribute_by_instance():
    kind = new_class()
    return scaled_by(kind(), changed=kind)


@looked_at
def class_attribute_that_an_instance_hides():
    return scaled_by(new_class()())


@found_by_a_check
def class_attribute_that_a_subclass_hides():
    class Other(new_class()):
        pass

    return scaled_by(Other(), changed=Other)


@found_by_a_check
def class_of_an_object():
    config, other = new_class()(), new_class()
    other.value = 5.0
    return lambda x: x * config.value, lambda v: setattr(config, "__class__", other)


@found_by_a_check
def class_attribute_of_a_module():
    class Scale(nn.Module):
        value = 1.0

        def forward(self, x):
            return x * self.value

    scale = Scale()
    return lambda x: scale(x), lambda v: setattr(Scale, "value", v)


@found_by_a_check
def property_of_a_class_attribute():
    class Config:
        value = 1.0

        @property
        def double(self):
            return 2 * type(self).value

    config = Config()
    return lambda x: x * config.double, lambda v: setattr(Config, "value", v)


@looked_at
def object_that_answers_every_name():
    class Answers:
        def __getattribute__(self, name):
            return object.__getattribute__(self, "value")

    config = Answers()
    config.value = 1.0
    return lambda x: x * config.anything, lambda v: setattr(config, "value", v)


@found_by_a_check
def slot_of_an_object_that_answers_every_name():
    class Answers:
        __slots__ = ("value",)

        def __getattribute__(self, name):
            return 2.0 * Answers.value.__get__(self)

    config = Answers()
    config.value = 1.0
    return lambda x: x * config.anything, lambda v: setattr(config, "value", v)


@looked_at
def object_that_denies_its_class():
    class Denies(new_class()):
        __module__ = 5

        @property
        def __class__(self):
            raise RuntimeError("not now")

    config = Denies()
    return lambda x: x * config.value, lambda v: setattr(config, "value", v)


@found_by_a_check
def slots():
    class Config:
        __slots__ = ("value",)

    config = Config()
    config.value = 1.0
    return scaled_by(config)


@found_by_a_check
def dataclass_with_slots():
    @dataclasses.dataclass(slots=True)
    class Config:
        value: float = 1.0

    return scaled_by(Config())


@looked_at
def attributes_as_a_dict():
    @dataclasses.dataclass
    class Config:
        value: float = 1.0

    config = Config()
    return lambda x: x * sum(dataclasses.asdict(config).values()), lambda v: setattr(config, "value", v)


@looked_at
def dynamic_attributes():
    class Config:
        def __init__(self):
            self._values = {"value": 1.0}

        def __getattr__(self, name):
            return self.__dict__["_values"][name]

    config = Config()
    return lambda x: x * config.value, lambda v: config._values.update(value=v)


@looked_at
def attribute_with_a_name_that_is_computed():
    config = types.SimpleNamespace(value_0=1.0)

    class Own:
        def __init__(self):
            self.value_0 = 1.0

    own = Own()
    return lambda x: x * getattr(own, f"value_{len(config.__dict__) - 1}"), lambda v: setattr(own, "value_0", v)


@looked_at
def attribute_getter():
    get, config = operator.attrgetter("value"), new_class()()
    return lambda x: x * get(config), lambda v: setattr(config, "value", v)


@looked_at
def attribute_of_a_python_module():
    module = types.ModuleType("settings_of_a_test")
    module.value = 1.0
    return scaled_by(module)


@found_by_a_check
def module_that_is_imported_inside():
    module = sys.modules["settings_inside"] = types.ModuleType("settings_inside")
    module.value = 1.0

    def function(x):
        import settings_inside  # noqa: PLC0415

        return x * settings_inside.value

    return function, lambda v: setattr(module, "value", v)


@found_by_a_check
def variables_through_globals():
    globals()["GLOBAL"] = 1.0
    return lambda x: x * globals()["GLOBAL"], lambda v: globals().update(GLOBAL=v)


@found_by_a_check
def variables_through_eval():
    globals()["GLOBAL"] = 1.0
    return lambda x: x * eval("GLOBAL"), lambda v: globals().update(GLOBAL=v)


@found_by_a_check
def a_global_that_hides_a_builtin():
    globals().pop("len", None)
    return lambda x: x * len((1,)), lambda v: globals().update(len=lambda _: v)


@looked_at
def attribute_of_the_function():
    def function(x):
        return x * function.value

    function.value = 1.0
    return function, lambda v: setattr(function, "value", v)


@looked_at
def defaults_of_a_function():
    def scale(x, value=1.0):
        return x * value

    return lambda x: scale(x), lambda v: setattr(scale, "__defaults__", (v,))


@looked_at
def code_of_a_function():
    def scale(x):
        return x * 2

    def other(x):
        return x * 3

    return lambda x: scale(x), lambda v: setattr(scale, "__code__", other.__code__)


@looked_at
def attribute_of_a_tensor():
    weight = gt.ones(1)
    weight.scale = 1.0
    return lambda x: x * weight * weight.scale, lambda v: setattr(weight, "scale", v)


@looked_at
def attribute_of_a_parameter():
    weight = nn.Parameter(gt.ones(1))
    return lambda x: x * weight.detach() * getattr(weight, "scale", 1.0), lambda v: setattr(weight, "scale", v)


@found_by_a_check
def numpy_element():
    values = np.ones(2)
    return lambda x: x * values[0], lambda v: values.__setitem__(0, v)


@found_by_a_check
def numpy_array_as_a_tensor():
    values = np.ones(1, dtype=np.float32)
    return lambda x: x * torch.from_numpy(values), lambda v: values.__setitem__(0, v)


@found_by_a_check
def large_numpy_array():
    values = np.ones(1 << 16)
    return lambda x: x * values[-1], lambda v: values.__setitem__(-1, v)


@found_by_a_check
def array_of_python():
    values = array.array("d", [1.0])
    return lambda x: x * values[0], lambda v: values.__setitem__(0, v)


@looked_at
def enum_member():
    class Mode(enum.Enum):
        A = 1
        B = 2

    config = types.SimpleNamespace(mode=Mode.A)
    return lambda x: x * (1.0 if config.mode is Mode.A else 2.0), lambda v: setattr(config, "mode", Mode.B)


@looked_at
def decimal_number():
    config = types.SimpleNamespace(value=decimal.Decimal(1))
    return lambda x: x * float(config.value), lambda v: setattr(config, "value", decimal.Decimal(v))


@looked_at
def time_span():
    config = {"span": datetime.timedelta(seconds=1)}
    return lambda x: x * config["span"].total_seconds(), lambda v: config.update(span=datetime.timedelta(seconds=v))


@looked_at
def user_dict():
    values = collections.UserDict(value=1.0)
    return lambda x: x * values["value"], lambda v: values.update(value=v)


@looked_at
def chain_map():
    values = collections.ChainMap({"value": 1.0})
    return lambda x: x * values["value"], lambda v: values.update(value=v)


@found_by_a_check
def mapping_proxy():
    values = {"value": 1.0}
    proxy = types.MappingProxyType(values)
    return lambda x: x * proxy["value"], lambda v: values.update(value=v)


@looked_at
def keys_of_a_dict():
    values = {1.0: None}

    def change(v):
        values.clear()
        values[v] = None

    return lambda x: x * sum(values), change


@found_by_a_check
def long_list():
    values = [1.0] * 5000
    return lambda x: x * values[4321], lambda v: values.__setitem__(4321, v)


@looked_at
def items_that_move_between_lists():
    first, second = [2.0, 3.0], [4.0]

    def change(_):
        if len(first) > 1:
            second.insert(0, first.pop())

    return lambda x: x * sum(first), change


@found_by_a_check
def weak_reference():
    class Config:
        pass

    config = Config()
    config.value = 1.0
    reference = weakref.ref(config)

    def change(v, _=config):
        config.value = v

    return lambda x: x * reference().value, change


@found_by_a_check
def cached_function():
    values = {"value": 1.0}

    @functools.lru_cache(None)
    def cached():
        return values["value"]

    def change(v):
        values["value"] = v
        cached.cache_clear()

    return lambda x: x * cached(), change


@found_by_a_check
def cached_function_that_is_reset():
    values = {"value": 1.0}

    @functools.lru_cache(maxsize=8)
    def cached():
        return values["value"]

    cached()
    values["value"] = 2.0
    return lambda x: x * cached(), lambda _: cached.cache_clear()


@found_by_a_check
def context_variable():
    variable = contextvars.ContextVar("variable", default=1.0)
    return lambda x: x * variable.get(), variable.set


@found_by_a_check
def environment():
    os.environ["VALUE_OF_A_TEST"] = "1"
    return lambda x: x * float(os.environ["VALUE_OF_A_TEST"]), lambda v: os.environ.update(VALUE_OF_A_TEST=str(v))


@looked_at
def partial():
    values = {"value": 1.0}
    scale = functools.partial(lambda x, values: x * values["value"], values=values)
    return lambda x: scale(x), lambda v: values.update(value=v)


@looked_at
def wrapped_by_a_library():
    values = {"value": 1.0}

    @torch.no_grad()
    def scale(x):
        return x * values["value"]

    return lambda x: scale(x), lambda v: values.update(value=v)


@looked_at
def activation_of_a_class():
    class Config:
        activation = staticmethod(torch.neg)

    return lambda x: Config.activation(x), lambda v: setattr(Config, "activation", staticmethod(torch.exp))


@looked_at
def activation_of_a_namespace():
    config = types.SimpleNamespace(activation=torch.neg)
    return lambda x: config.activation(x), lambda v: setattr(config, "activation", torch.exp)


@looked_at
def global_activation():
    globals()["ACTIVATION"] = torch.neg
    return lambda x: ACTIVATION(x), lambda v: globals().update(ACTIVATION=torch.exp)


@found_by_a_check
def method_that_is_replaced():
    class Model:
        def scale(self, x):
            return x * 2

    model = Model()
    return lambda x: model.scale(x), lambda v: setattr(Model, "scale", lambda self, x: x * 3)


@looked_at
def forward_of_a_module():
    module = nn.Tanh()
    return lambda x: module(x), lambda v: setattr(module, "forward", lambda x: x * 3)


@looked_at
def private_attribute_of_a_module():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self._value = 1.0

        def forward(self, x):
            return x * self._value

    scale = Scale()
    return lambda x: scale(x), lambda v: setattr(scale, "_value", v)


@looked_at
def flag_of_torch():
    def function(x):
        return x * (2 if torch.are_deterministic_algorithms_enabled() else 1)

    return function, lambda v: torch.use_deterministic_algorithms(v == 3)


@found_by_a_check
def rate_that_the_function_reads():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    group = optimizer.param_groups[0]
    return lambda x: x * optimizer.param_groups[0]["lr"], lambda v: group.update(lr=v)


class Shown:
    """An object that is shown by a number that its code does not get by name."""

    def __init__(self):
        self.hidden = 1.0

    def __str__(self):
        return str(self.hidden)

    def __repr__(self):
        return repr(self.hidden)


def shown_by(show):
    """A function that scales by an object's text, and a change of the object."""
    shown = Shown()
    return lambda x: x * float(show(shown)), lambda v: setattr(shown, "hidden", v)


@looked_at
def text_of_an_object():
    return shown_by(lambda shown: str(shown))


@looked_at
def formatted_object():
    return shown_by(lambda shown: f"{shown}")


@looked_at
def formatted_representation():
    return shown_by(lambda shown: f"{shown!r}")


@looked_at
def object_formatted_by_a_method():
    return shown_by("{}".format)


@looked_at
def object_formatted_by_an_operator():
    return shown_by(lambda shown: "%s" % shown)  # noqa: UP031


@looked_at
def representation_by_another_name():
    show = repr
    return shown_by(lambda shown: show(shown))


@looked_at
def pattern_of_a_class():
    class Point:
        __match_args__ = ("first",)

    point = Point()
    point.first = 1.0

    def function(x):
        match point:
            case Point(value):
                return x * value

    return function, lambda v: setattr(point, "first", v)


@found_by_a_check
def factory_of_a_dict():
    values = {"value": 1.0}
    table = collections.defaultdict(lambda: values["value"])

    def function(x):
        result = x * table["key"]
        table.clear()
        return result

    return function, lambda v: values.update(value=v)


@found_by_a_check
def factory_of_a_dict_that_is_replaced():
    table = collections.defaultdict(lambda: 1.0)

    def function(x):
        result = x * table["key"]
        table.clear()
        return result

    return function, lambda v: setattr(table, "default_factory", lambda: v)


@found_by_a_check
def environment_by_another_name():
    os.environ["VALUE_OF_A_TEST"] = "1"
    read = os.getenv
    return lambda x: x * float(read("VALUE_OF_A_TEST")), lambda v: os.environ.update(VALUE_OF_A_TEST=str(v))


@looked_at
def level_of_a_logger():
    logger = logging.getLogger("gt.test.level")
    logger.setLevel(logging.WARNING)
    return lambda x: x * (3 if logger.isEnabledFor(logging.INFO) else 2), lambda _: logger.setLevel(logging.DEBUG)


@found_by_a_check
def level_of_a_parent_of_a_logger():
    parent, logger = logging.getLogger("gt.test.parent"), logging.getLogger("gt.test.parent.child")
    parent.setLevel(logging.WARNING)
    return lambda x: x * (3 if logger.isEnabledFor(logging.INFO) else 2), lambda _: parent.setLevel(logging.DEBUG)


@found_by_a_check
def level_of_a_logger_that_the_function_gets():
    logger = logging.getLogger("gt.test.named")
    logger.setLevel(logging.WARNING)

    def function(x):
        return x * (3 if logging.getLogger("gt.test.named").isEnabledFor(logging.INFO) else 2)

    return function, lambda _: logger.setLevel(logging.DEBUG)


@found_by_a_check
def class_that_is_registered():
    class Interface(abc.ABC):  # noqa: B024
        pass

    kind = new_class()
    value = kind()
    return lambda x: x * (3 if isinstance(value, Interface) else 2), lambda _: Interface.register(kind)


@found_by_a_check
def class_that_is_registered_with_the_standard_library():
    value = new_class()()
    sized = collections.abc.Sized
    return lambda x: x * (3 if isinstance(value, sized) else 2), lambda _: sized.register(type(value))


@found_by_a_check
def new_subclass():
    kind, made = new_class(), []
    return lambda x: x * (1 + len(kind.__subclasses__())), lambda _: made.append(type("Other", (kind,), {}))


@found_by_a_check
def special_method_that_is_added():
    kind = new_class()
    value = kind()
    return lambda x: x * (2 if value else 3), lambda _: setattr(kind, "__bool__", lambda self: False)


@found_by_a_check
def version_of_a_tensor():
    weight = gt.ones(2)
    first = weight._version
    return lambda x: x * (2 if weight._version == first else 3), lambda _: weight.add_(0)


@found_by_a_check
def backend_of_torch():
    def change(_):
        torch._C._set_mkldnn_enabled(False)  # some tests freeze the flags of torch.backends

    return lambda x: x * (2 if torch.backends.mkldnn.enabled else 3), change


@found_by_a_check
def backend_of_torch_by_a_local_name():
    def function(x):
        from torch import backends as found  # noqa: PLC0415

        mkldnn = found.mkldnn
        return x * (2 if mkldnn.enabled else 3)

    def change(_):
        torch._C._set_mkldnn_enabled(False)  # some tests freeze the flags of torch.backends

    return function, change


@found_by_a_check
def threads_of_torch():
    threads = torch.get_num_threads()
    return lambda x: x * (2 if torch.get_num_threads() == threads else 3), lambda _: torch.set_num_threads(threads + 1)


@found_by_a_check
def limit_of_the_interpreter():
    limit = sys.getrecursionlimit()

    def function(x):
        import sys as interpreter  # noqa: PLC0415

        return x * (2 if interpreter.getrecursionlimit() == limit else 3)

    return function, lambda v: sys.setrecursionlimit(limit + int(v))


@found_by_a_check
def folder_of_the_process():
    folder = os.getcwd()

    def function(x):
        return x * (2 if os.getcwd() == folder else 3)

    return function, lambda _: os.chdir("/")


@looked_at
def time_in_a_table():
    start, table = time.monotonic(), {"now": time.monotonic}
    moved = [0.0]
    return lambda x: x * (2 if table["now"]() + moved[0] < start + 1e6 else 3), lambda _: moved.__setitem__(0, 1e7)


@looked_at
def list_of_a_library():
    count = len(sys.path)
    return lambda x: x * (2 if len(sys.path) == count else 3), lambda _: sys.path.append("/tmp")


@looked_at
def function_of_a_library_that_is_replaced():
    def change(_):
        math.gt_test = lambda: 3.0

    math.gt_test = lambda: 2.0
    return lambda x: x * math.gt_test(), change


@found_by_a_check
def object_that_the_function_makes():
    values = {"value": 1.0}

    class Made:
        def __init__(self):
            self.made = values["value"]

    return lambda x: x * Made().made, lambda v: values.update(value=v)


@looked_at
def attribute_by_getattr_of_another_name():
    read, config, names = getattr, new_class()(), ["va", "lue"]
    return lambda x: x * read(config, "".join(names)), lambda v: setattr(config, "value", v)


@looked_at
def attributes_of_a_copy_by_another_name():
    clone, config, names = copy.deepcopy, new_class()(), ["va", "lue"]
    config.value = 1.0
    return lambda x: x * next(iter(clone(config).__dict__.values())), lambda v: setattr(config, "".join(names), v)


def settings_of_process():
    """The settings of the process that cases change."""
    return os.getcwd(), sys.getrecursionlimit(), list(sys.path), torch.get_num_threads()


def restore_process(settings):
    folder, limit, path, threads = settings
    os.chdir(folder)
    sys.setrecursionlimit(limit)
    sys.path[:] = path
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(True)
    math.__dict__.pop("gt_test", None)


def calls_with_and_without(make, check_every):
    before = settings_of_process()
    try:
        expected, _, _ = calls_of(make)
        restore_process(before)
        found, errors, compiled = calls_of(make, check_every)
    finally:
        restore_process(before)
        torch.use_deterministic_algorithms(False)
        globals().pop("len", None)
    assert len(set(expected)) > 1
    return expected, found, errors, compiled


@pytest.mark.parametrize("check_every", [1, 3, 1000])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_value_that_gt_looks_at_is_never_missed(name, check_every):
    expected, found, errors, compiled = calls_with_and_without(LOOKED_AT[name], check_every)
    assert (found, errors) == (expected, {})
    assert (compiled.skipped == 0) == (check_every == 1) and compiled.checked


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("name", FOUND)
def test_any_other_value_is_found_by_a_check(name, check_every):
    expected, found, errors, compiled = calls_with_and_without(FOUND[name], check_every)
    may_be_wrong = set()
    for number, error in errors.items():
        skipped = re.fullmatch(r".*test_state_outside_of_arguments\.py:\d+: .* agreed: (\d+) calls?[,.] .*", error)[1]
        may_be_wrong.update(range(number - int(skipped), number + 1))
    wrong = {number for number in range(CALLS) if found[number] != expected[number]}
    assert errors and wrong <= may_be_wrong
    assert (compiled.skipped == 0) == (check_every == 1)


# Objects that the function itself changes

EFFECTS = {}
effect_case = case_of(EFFECTS)


@effect_case
def deque_that_rotates():
    values = collections.deque([1.0] * 8 + [2.0])

    def function(x):
        values.rotate(-1)
        return x * values[0]

    return function


@effect_case
def tensors_in_a_deque():
    values = collections.deque([gt.ones(1) * number for number in range(4)])

    def function(x):
        values.rotate(1)
        return values[0] * x

    return function


@effect_case
def order_of_a_dict():
    values = collections.OrderedDict((number, gt.ones(1) * number) for number in range(4))

    def function(x):
        values.move_to_end(next(iter(values)))
        return next(iter(values.values())) * x

    return function


def scaled_from(values):
    """A function that takes a number from a queue in each call."""
    for number in range(CALLS):
        values.put(1.0 if number < 8 else float(number))
    return lambda x: x * values.get()


@effect_case
def queue_of_numbers():
    return scaled_from(queue.Queue())


@effect_case
def simple_queue():
    return scaled_from(queue.SimpleQueue())


@effect_case
def count():
    counter = itertools.count()
    return lambda x: x * (2 if next(counter) > 8 else 1)


@effect_case
def generator_function():
    def numbers():
        for number in range(CALLS):
            yield 1.0 if number < 8 else float(number)

    made = numbers()
    return lambda x: x * next(made)


@effect_case
def own_iterator():
    class Numbers:
        def __init__(self):
            self._number = 0

        def __next__(self):
            self._number += 1
            return 2.0 if self._number > 8 else 1.0

    numbers = Numbers()
    return lambda x: x * next(numbers)


@effect_case
def private_counter_of_a_module():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self._calls = 0

        def forward(self, x):
            self._calls += 1
            return x * (2.0 if self._calls > 8 else 1.0)

    return Scale()


@effect_case
def values_of_a_thread():
    local = threading.local()
    local.calls = 0

    def function(x):
        local.calls += 1
        return x * (2.0 if local.calls > 8 else 1.0)

    return function


@effect_case
def generator_of_python():
    draw = random.Random(0).random
    return lambda x: x * (2 if draw() > 0.9 else 1)


@effect_case
def generator_of_numpy():
    generator = np.random.default_rng(0)
    return lambda x: x * (2 if generator.random() > 0.9 else 1)


@effect_case
def old_generator_of_numpy():
    draw = np.random.RandomState(0).rand
    return lambda x: x * (2 if draw() > 0.9 else 1)


@effect_case
def generator_of_torch():
    generator = torch.Generator().manual_seed(0)
    return lambda x: x * (2 if torch.rand((), generator=generator).item() > 0.8 else 1)


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_that_shows_is_refused_or_found_by_a_check(name):
    make = lambda: (EFFECTS[name](), lambda _: None)
    expected, _, _ = calls_of(make)
    found, errors, compiled = calls_of(make, check_every=1)
    assert all(found[number] == (None if number in errors else expected[number]) for number in range(CALLS))
    assert len(set(expected)) > 1 and (errors or compiled.reasons)


class Trainer(abc.ABC):  # noqa: B024
    """What ordinary programs have around a step: counters, logs, errors with texts, flags of libraries."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.started = time.time()
        self.weight = gt.ones(2)

    def __repr__(self):
        return f"Trainer({self.count})"

    def loss(self, x):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{self} takes tensors, not {type(x)}")
        return (x * self.weight).sum() * math.exp(0.5)

    def step(self, x):
        if torch.distributed.is_initialized() or torch.cuda.is_available():
            torch.distributed.barrier()
        logging.getLogger("gt.test").debug("a step of %s", os.path.join("a", "b"))
        return self.loss(x)


def test_an_ordinary_step_is_skipped():
    trainer, x = Trainer(), gt.ones(2)
    compiled = gt.compile(trainer.step)
    for _ in range(6):
        assert compiled(x).item() == trainer.step(x).item()
        trainer.count += 1
    assert (compiled.checked, compiled.skipped, compiled.reasons) == (2, 1, [])


# Training


def training(model, make_optimizer, change=lambda model, optimizer: None):
    """The losses of a training with gt.compile and without, and the compiled step."""

    def run(is_compiled):
        torch.manual_seed(0)
        trained = gt.to(model())
        optimizer = make_optimizer(trained.parameters())

        def step(x):
            optimizer.zero_grad()
            loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        called = gt.compile(step) if is_compiled else step
        losses, handle = [], None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(CALLS):
                if number == CHANGED_AT:
                    handle = change(trained, optimizer)
                data = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
                losses.append(called(gt.to(data)).item())
        if handle is not None:
            handle.remove()
        return losses, called, optimizer

    return run(False), run(True)


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def double_gradients(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(2)


def double_gradient(parameter):
    parameter.grad.mul_(2)


def double_tanh(module, _, result):
    return result * 2 if isinstance(module, nn.Tanh) else result


HOOKS = {
    "parameter": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient * 2),
    "accumulated": lambda model, _: model[0].weight.register_post_accumulate_grad_hook(double_gradient),
    "module": lambda model, _: model[1].register_forward_hook(double_tanh),
    "all modules": lambda *_: nn.modules.module.register_module_forward_hook(double_tanh),
    "optimizer": lambda _, optimizer: optimizer.register_step_pre_hook(double_gradients),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_are_registered_later(hook):
    (expected, *_), (found, step, _) = training(layers, lambda p: torch.optim.SGD(p, lr=0.1), HOOKS[hook])
    assert found == expected
    assert step.skipped > 3


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
    ],
    ids=["adam", "momentum", "rmsprop"],
)
def test_a_state_of_the_optimizer_that_is_cleared(make):
    (expected, *_), (found, step, _) = training(layers, make, lambda _, optimizer: optimizer.state.clear())
    assert found == expected
    assert step.skipped > 3


class Lookahead(torch.optim.SGD):
    """SGD that goes half of the way back after each seventh step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.count += 1
        if self.count % 7 == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Decay(torch.optim.Optimizer):
    """Gradient descent with a rate that falls with the number of steps."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"] / math.sqrt(self.count))


class CountInState(Decay):
    """The same, with the count in the state of the parameters."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            entries = self.state[parameter]
            entries["count"] = entries.get("count", 0) + 1
            rate = self.param_groups[0]["lr"] * (0.5 if entries["count"] > 9 else 1.0)
            parameter.add_(parameter.grad, alpha=-rate)


@pytest.mark.parametrize("kind", [Lookahead, Decay, CountInState])
def test_counters_of_an_optimizer_of_the_program(kind):
    (expected, _, eager), (found, _, optimizer) = training(layers, lambda p: kind(p, lr=0.1))
    assert found == expected
    assert optimizer.count == eager.count


def test_the_rate_of_two_steps_in_a_call():
    def run(is_compiled):
        weight = nn.Parameter(gt.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def step(x):
            for _ in range(2):
                optimizer.zero_grad()
                (weight * x).sum().backward()
                optimizer.step()

        called = gt.compile(step) if is_compiled else step
        for number in range(CHANGED_AT + 2):
            if number == CHANGED_AT:
                optimizer.param_groups[0]["lr"] = 2.0
            called(gt.ones(1))
        return weight.item()

    assert run(True) == run(False)


# Functions that must be skipped


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.LayerNorm(3), nn.Linear(3, 2),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0]


@pytest.mark.parametrize("model", [layers, Convolutions, Recurrent])
def test_training_of_common_modules_is_skipped(model):
    (expected, *_), (found, step, _) = training(model, lambda p: torch.optim.AdamW(p, lr=0.1))
    assert found == expected
    assert (step.checked, step.skipped) == (2, CALLS - 6)
    assert not step.reasons


def test_training_of_a_language_model_is_skipped():
    torch.manual_seed(0)
    model = gt.to(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8)))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    @functools.partial(gt.compile, check_every=4)
    def step(tokens):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    for _ in range(9):
        step(gt.to(torch.randint(0, 16, (2, 6))))
        schedule.step()
    assert (step.checked, step.skipped) == (3, 2)
    model.config._attn_implementation = "eager"  # an object of the library, which reads it in each call
    with pytest.raises(gt.CompileError, match=r"modeling_gpt2|sdpa_attention|test_state_outside"):
        for _ in range(4):
            step(gt.to(torch.randint(0, 16, (2, 6))))
