"""GT: unchanged PyTorch programs on one worker, several workers of a machine, or a shared server.

Public names only. They are found on first use, so that `python -m gt.server` runs on a machine without torch. A name
that GT does not define is torch's, so that a script may `import gt as torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gt.garbage_collection import paused_collection
from gt.lazy_launch import load_launcher
from gt.version import __version__

if TYPE_CHECKING:
    from gt import data as data
    from gt import debug as debug
    from gt import distributed as distributed
    from gt import launch as launch
    from gt import nn as nn
    from gt import optim as optim
    from gt import signal as signal
    from gt.client.compilation.compiled_function import compile as compile  # noqa: A004
    from gt.client.creation import arange as arange
    from gt.client.creation import as_tensor as as_tensor
    from gt.client.creation import asarray as asarray
    from gt.client.creation import bartlett_window as bartlett_window
    from gt.client.creation import bernoulli as bernoulli
    from gt.client.creation import blackman_window as blackman_window
    from gt.client.creation import device as device
    from gt.client.creation import distribute as distribute
    from gt.client.creation import empty as empty
    from gt.client.creation import empty_like as empty_like
    from gt.client.creation import empty_strided as empty_strided
    from gt.client.creation import eye as eye
    from gt.client.creation import from_numpy as from_numpy
    from gt.client.creation import full as full
    from gt.client.creation import full_like as full_like
    from gt.client.creation import hamming_window as hamming_window
    from gt.client.creation import hann_window as hann_window
    from gt.client.creation import kaiser_window as kaiser_window
    from gt.client.creation import linspace as linspace
    from gt.client.creation import logspace as logspace
    from gt.client.creation import manual_seed as manual_seed
    from gt.client.creation import normal as normal
    from gt.client.creation import ones as ones
    from gt.client.creation import ones_like as ones_like
    from gt.client.creation import rand as rand
    from gt.client.creation import rand_like as rand_like
    from gt.client.creation import randint as randint
    from gt.client.creation import randint_like as randint_like
    from gt.client.creation import randn as randn
    from gt.client.creation import randn_like as randn_like
    from gt.client.creation import randperm as randperm
    from gt.client.creation import replicate as replicate
    from gt.client.creation import scalar_tensor as scalar_tensor
    from gt.client.creation import shard as shard
    from gt.client.creation import tensor as tensor
    from gt.client.creation import to as to
    from gt.client.creation import tril_indices as tril_indices
    from gt.client.creation import triu_indices as triu_indices
    from gt.client.creation import zeros as zeros
    from gt.client.creation import zeros_like as zeros_like
    from gt.client.layouts import mesh as mesh
    from gt.client.layouts import open_mesh as open_mesh
    from gt.client.opt_einsum_functions import tensordot as tensordot
    from gt.client.opt_einsum_functions import transpose as transpose
    from gt.client.publishing import publish as publish
    from gt.client.publishing import subscribe as subscribe
    from gt.client.publishing import unpublish as unpublish
    from gt.client.recovery import recover as recover
    from gt.client.tensor import Tensor as Tensor
    from gt.core.errors import CompileError as CompileError
    from gt.core.errors import GTError as GTError
    from gt.core.errors import LayoutError as LayoutError
    from gt.core.errors import LimitError as LimitError
    from gt.core.errors import NonFiniteError as NonFiniteError
    from gt.core.errors import OpError as OpError
    from gt.core.errors import PublishError as PublishError
    from gt.core.errors import ReadOnlyError as ReadOnlyError
    from gt.core.errors import RecoveryError as RecoveryError
    from gt.core.errors import ServerLost as ServerLost
    from gt.core.errors import SessionError as SessionError
    from gt.core.errors import SessionLost as SessionLost
    from gt.core.errors import SettingsError as SettingsError
    from gt.core.errors import SignalError as SignalError
    from gt.core.errors import WorkerLost as WorkerLost
    from gt.debug import explain as explain
    from gt.debug import visualize_sharding as visualize_sharding
    from gt.distributed.interchange import from_dtensor as from_dtensor
    from gt.distributed.interchange import from_shards as from_shards
    from gt.distributed.interchange import to_dtensor as to_dtensor
    from gt.distributed.interchange import torch_placements as torch_placements
    from gt.distributed.mappers import from_torch as from_torch
    from gt.distributed.mappers import to_torch as to_torch
    from gt.launch.auto_shard import auto_shard as auto_shard
    from gt.launch.calibrate import calibrate as calibrate
    from gt.launch.sessions import connect as connect
    from gt.launch.sessions import dashboard as dashboard
    from gt.launch.sessions import gpu_workers as gpu_workers
    from gt.launch.sessions import init as init
    from gt.launch.sessions import shutdown as shutdown
    from gt.launch.sessions import synchronize as synchronize
    from gt.launch.sessions import workers as workers
    from gt.launch.sharding_plan import Plan as Plan
    from gt.sharding.calibration import Calibration as Calibration
    from gt.sharding.placements import Partial as Partial
    from gt.sharding.placements import Replicate as Replicate
    from gt.sharding.placements import Shard as Shard
    from gt.sharding.spec import DeviceMesh as DeviceMesh
    from gt.sharding.spec import ShardingSpec as ShardingSpec
    from gt.signals.config import ModelConfig as ModelConfig
    from gt.signals.config import ShardConfig as ShardConfig
    from gt.signals.config import SignalConfig as SignalConfig
    from gt.signals.registry import get_config as get_config
    from gt.signals.registry import get_signal_config as get_signal_config
    from gt.signals.registry import load_config as load_config
    from gt.signals.registry import register_config as register_config

    # Torch's names, and once more those that GT replaces: mypy takes the first import of a name, and pyright the last.
    # isort: split
    from torch import *  # type: ignore[assignment]  # noqa: F403
    from torch import amp as amp
    from torch import autograd as autograd
    from torch import backends as backends
    from torch import cuda as cuda
    from torch import fft as fft
    from torch import func as func
    from torch import jit as jit
    from torch import linalg as linalg
    from torch import special as special
    from torch import utils as utils
    from torch._C import *  # type: ignore[assignment]  # noqa: F403
    from torch._C._VariableFunctions import *  # type: ignore[assignment]  # noqa: F403
    from torch.functional import *  # type: ignore[assignment]  # noqa: F403

    # isort: split
    from gt import distributed as distributed  # noqa: F811
    from gt.client.compilation.compiled_function import compile as compile  # noqa: A004, F811
    from gt.client.creation import *  # type: ignore[assignment]  # noqa: F403
    from gt.client.opt_einsum_functions import tensordot as tensordot  # noqa: F811
    from gt.client.opt_einsum_functions import transpose as transpose  # noqa: F811
    from gt.client.tensor import Tensor as Tensor  # noqa: F811

_NAMES: dict[str, str] = {
    "gt.client.creation": (
        "arange as_tensor asarray bartlett_window bernoulli blackman_window device distribute empty empty_like "
        "empty_strided eye from_numpy full full_like hamming_window hann_window kaiser_window linspace logspace "
        "manual_seed normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
        "replicate scalar_tensor shard tensor to tril_indices triu_indices zeros zeros_like"
    ),
    "gt.client.compilation.compiled_function": "compile",
    "gt.client.opt_einsum_functions": "tensordot transpose",
    "gt.client.layouts": "mesh open_mesh",
    "gt.client.publishing": "publish subscribe unpublish",
    "gt.client.recovery": "recover",
    "gt.client.tensor": "Tensor",
    "gt.debug": "explain visualize_sharding",
    "gt.distributed.interchange": "from_dtensor from_shards to_dtensor torch_placements",
    "gt.distributed.mappers": "from_torch to_torch",
    "gt.core.errors": (
        "CompileError GTError LayoutError LimitError NonFiniteError OpError PublishError ReadOnlyError RecoveryError "
        "ServerLost SessionError SessionLost SettingsError SignalError WorkerLost"
    ),
    "gt.launch.auto_shard": "auto_shard",
    "gt.launch.calibrate": "calibrate",
    "gt.launch.sessions": "connect dashboard gpu_workers init shutdown synchronize workers",
    "gt.launch.sharding_plan": "Plan",
    "gt.sharding.calibration": "Calibration",
    "gt.sharding.placements": "Partial Replicate Shard",
    "gt.sharding.spec": "DeviceMesh ShardingSpec",
    "gt.signals.config": "ModelConfig ShardConfig SignalConfig",
    "gt.signals.registry": "get_config get_signal_config load_config register_config",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = ("data", "debug", "distributed", "launch", "nn", "optim", "signal")

__all__ = ["__version__", *_MODULE_OF, *_SUBMODULES]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'gt' has no attribute {name!r}")
        with paused_collection():
            load_launcher()
            if name in _SUBMODULES:
                return importlib.import_module(f"gt.{name}")
            try:
                value = globals()[name] = _found(name)
            except AttributeError as error:
                importlib.import_module("gt.core.tracebacks").leave_out_own_frames(error)
                raise
            return value


def _found(name: str) -> Any:
    """A name of GT, or else torch's own, whose functions work on GT tensors."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    torch = importlib.import_module("torch")
    if not hasattr(torch, name):
        raise AttributeError(f"module 'gt' has no attribute {name!r}, and neither has torch")
    return getattr(torch, name)


def __dir__() -> list[str]:
    return sorted(__all__)
