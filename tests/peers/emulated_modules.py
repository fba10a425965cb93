"""Modules of other packages, executed as on a Mac, with the emulator's kernels."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm import utils

import metal_emulator


def load(
    name: str,
    file: Path,
    metal_kernel: Callable[..., Any] = metal_emulator.metal_kernel,
) -> ModuleType:
    """Executes a module once more, so that its kernels are the emulator's."""
    spec = importlib.util.spec_from_file_location(f"{name}_emulated", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(mx.fast, "metal_kernel", metal_kernel))
        enter(mock.patch.object(mx.metal, "is_available", return_value=True))
        enter(mock.patch.object(utils, "can_run_metal", return_value=True))
        spec.loader.exec_module(module)
    return module
