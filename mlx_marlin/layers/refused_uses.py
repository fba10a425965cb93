"""Saving and sharding of modules whose parameters stock MLX cannot read.

MLX and mlx-lm collect parameters in the same way to save, shard or evaluate them, so a
module cannot tell what they are read for. Their functions are wrapped instead.
"""

import inspect
import sys
from abc import abstractmethod
from functools import wraps
from types import ModuleType
from typing import Any, Self

import mlx.nn as nn
from mlx.nn.layers import distributed

SAVED = (
    "stock MLX cannot load such parameters; call mlx_marlin.restore(model) before "
    "saving"
)
SHARDED = (
    "it cannot be sharded; shard the model before mlx_marlin.optimize(model), or call "
    "mlx_marlin.restore(model) first"
)
_WRAPPED = "_mlx_marlin_refuses"


class RefusingModule(nn.Module):
    """A module that may refuse to be saved or sharded.

    Making one wraps the functions of MLX, and of mlx-lm if it is loaded, that do so.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Returns a module, once the functions are wrapped."""
        _wrap_all()
        return super().__new__(cls)

    @abstractmethod
    def why_not(self, use: str) -> str | None:
        """Returns why the module refuses a use, `SAVED` or `SHARDED`, or None."""


def _wrap_all() -> None:
    _wrap(nn.Module, "save_weights", "self", SAVED)
    if hasattr(distributed, "FullyShardedModule"):  # MLX had none at first
        _wrap(distributed.FullyShardedModule, "__init__", "module", SHARDED)
    _wrap(distributed, "shard_inplace", "module", SHARDED)
    _wrap(distributed, "shard_linear", "module", SHARDED)
    utils = sys.modules.get("mlx_lm.utils")
    if hasattr(utils, "save_model"):
        _wrap(utils, "save_model", "model", SAVED)


def _wrap(owner: Any, name: str, argument: str, use: str) -> None:
    """Replaces a function by one that asks the modules of an argument first.

    Modules that have imported the function by its name get the new one too.
    """
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return
    signature = inspect.signature(original)

    @wraps(original)
    def asking(*args: Any, **kwargs: Any) -> Any:
        _refuse(signature.bind(*args, **kwargs).arguments[argument], use)
        return original(*args, **kwargs)

    setattr(asking, _WRAPPED, True)
    setattr(owner, name, asking)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is original:
            setattr(module, name, asking)


def _refuse(module: nn.Module, use: str) -> None:
    """Raises a ValueError if a module or one inside of it refuses a use."""
    for own in module.modules():
        reason = own.why_not(use) if isinstance(own, RefusingModule) else None
        if reason is not None:
            raise ValueError(reason)
