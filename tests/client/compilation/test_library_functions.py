"""gt.compile: functions of libraries whose results depend on their arguments only, and the others."""

import contextlib
import copy
import datetime
import functools
import gc
import json
import math
import operator
import os
import random
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from torch.nn import functional

from gt.client.compilation.library_functions import (
    called_methods,
    home_of,
    is_compared,
    is_pure,
    is_unbounded,
    reads_all_attributes,
    reads_environment,
)

PURE = [
    math.sqrt, operator.add, functools.reduce, copy.copy, json.dumps, os.path.join, os.getpid, len, isinstance, print,
    contextlib.suppress.__init__, datetime.datetime.fromtimestamp, gc.collect, np.sum, torch.neg, torch.zeros,
    torch.einsum, torch.is_tensor, torch.is_grad_enabled, torch.get_default_dtype, torch.linalg.norm, torch.fft.fft,
    functional.linear, functional.cross_entropy, torch.autograd.grad, torch.nn.utils.clip_grad_norm_,
    torch.cuda.is_available, torch.vmap, torch.are_deterministic_algorithms_enabled,
]  # fmt: skip
IMPURE = [
    time.time, time.perf_counter, time.sleep, os.listdir, os.stat, os.path.exists, os.urandom, open, input,
    datetime.datetime.now, datetime.date.today, subprocess.run, threading.get_ident, sys.getrefcount, gc.get_objects,
    torch.get_rng_state, torch.load, torch.from_file, torch.cuda.memory_allocated, torch.distributed.get_rank,
]  # fmt: skip


@pytest.mark.parametrize("function", [each for each in PURE if isinstance(each, types.FunctionType | type(len))])
def test_pure_functions(function):
    assert is_pure(function)


@pytest.mark.parametrize("function", IMPURE)
def test_functions_that_read_the_state_of_the_process(function):
    assert not is_pure(function)
    assert not is_compared(function)


def test_functions_whose_results_are_compared():
    assert all(map(is_compared, (torch.get_num_threads, sys.getrecursionlimit, os.getcwd)))
    assert reads_environment(os.getenv) and not reads_environment(os.getcwd)


def test_functions_that_read_attributes_by_other_means():
    assert reads_all_attributes("other", getattr) and not reads_all_attributes("getattr", getattr)
    assert reads_all_attributes("vars", vars) and not reads_all_attributes("len", len)
    assert is_unbounded(eval) and not is_unbounded(len)
    assert "__repr__" in called_methods(repr) and "__str__" in called_methods("{}".format)
    assert "__deepcopy__" in called_methods(copy.deepcopy) and not called_methods(len)


def test_the_home_of_a_function():
    assert home_of(time.time) == "time.time"
    assert home_of(datetime.datetime.now) == "datetime.datetime.now"
    assert home_of(torch.neg) == "torch._C._VariableFunctions.neg"
    assert home_of(random.random) == ""  # its generator is compared
