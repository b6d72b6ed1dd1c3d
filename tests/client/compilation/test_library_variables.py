"""gt.compile: variables of libraries behind dotted names."""

import os
import sys
import types

import torch

from gt.client.compilation.library_variables import find_variable


def names(text):
    return tuple(text.split("."))


def test_the_last_variable_of_a_library():
    found = find_variable(torch, names("torch.backends.mkldnn.enabled.real"))
    assert (found.name, found.owner, found.value) == (
        "torch.backends.mkldnn.enabled",
        torch.backends.mkldnn,
        torch.backends.mkldnn.enabled,
    )
    assert find_variable(os, names("os.environ.get")).value is os.environ
    assert find_variable(torch, names("torch.backends.cuda.matmul.allow_tf32")).attribute == "allow_tf32"


def test_modules_of_the_program_are_passed_through():
    module = types.ModuleType("a_module_of_a_test")
    module.os, module.value = os, 1
    assert find_variable(module, names("module.os.sep")).value == os.sep
    assert find_variable(module, names("module.value")) is None
    assert find_variable(object(), names("value.real")) is None


def test_modules_that_are_not_loaded_stay_so():
    package = types.ModuleType("os.not_loaded")
    package.__getattr__ = lambda name: sys.exit("loaded")
    assert find_variable(package, names("package.value")) is None
