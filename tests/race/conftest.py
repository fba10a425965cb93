"""Machines whose clocks a test makes up; nothing runs on them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin import cache, state
from mlx_marlin.backends import devices, measured_results, selection
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.lm.layer_conversion import is_marlin_layer
from mlx_marlin.lm.module_tree import computing_layers
from mlx_marlin.lm.race import at_load, forward_race, stock_kernels
from mlx_marlin.lm.race.model_products import Entry
from mlx_marlin.lm.race.stock_kernels import StockKernels
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.timing import Spread
from mlx_marlin.products import packing
from support.choose import Choose

M3_MAX = Device.named("M3 Max")
DEVICES = {"metal": M3_MAX, "cuda": CudaDevice.named("NVIDIA H200")}
US = 1e-6


@dataclass(kw_only=True)
class SimulatedMac:
    """A machine whose products take the times that a test says."""

    # From an entry's layout and the rows to microseconds
    ours: Callable[[str, int], float] = lambda layout, m: 10.0
    stock: Callable[[int], float] = lambda m: 10.0  # From rows to microseconds
    # From rows, and whether our kernels run, to milliseconds
    forward: Callable[[int, bool], float] = lambda m, ours: 1.0
    range: float = 0.0  # Interquartile range of all times, relative to the median
    # The rows of each measurement, with the layouts
    raced: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    # The rows of each forward pass, and whether our kernels ran
    passes: list[tuple[int, bool]] = field(default_factory=list)
    error: BaseException | None = None
    # How many measurements an interrupt follows, if any
    interrupted_after: int | None = None
    seconds_each: float = 0.0
    now: float = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def clock(self, _: Any) -> Clock:
        return Clock(
            name="wall time",
            measure=self.measure,
            measure_independent=self.measure,
            weights=lambda _: 1,
            times_stock=True,
        )

    def measure(
        self, products: Mapping[Entry, Any], inputs: Operands
    ) -> dict[Entry, Spread]:
        if self.error is not None:
            raise self.error
        if len(self.raced) == self.interrupted_after:
            raise KeyboardInterrupt
        self.now += self.seconds_each
        m = inputs.problem.m
        self.raced.append((m, tuple(each.layout for each in products if each.plan)))
        return {entry: self._spread(entry, m) for entry in products}

    def _spread(self, entry: Entry, m: int) -> Spread:
        us = self.ours(entry.layout, m) if entry.plan else self.stock(m)
        return Spread(median=us * US, range=self.range * us * US, samples=3)

    def time_passes(self, model: nn.Module, m: int, count: int) -> list[float]:
        assert forward_race.can_run(model)
        ours = any(map(is_marlin_layer, computing_layers(model)))
        self.passes.append((m, ours))
        seconds = self.forward(m, ours) * 1e-3
        self.now += count * seconds
        return [seconds] * count

    def optimize(self, model: nn.Module, **options: Any) -> nn.Module:
        """Optimizes a model as in a new process that has begun to race."""
        forget_process()
        self.raced.clear()
        self.passes.clear()
        return mlx_marlin.optimize(model, **options)


@pytest.fixture
def mac(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[SimulatedMac]:
    """Makes an M3 Max seem available; what it measures is kept in a test's folder."""
    yield from simulated(backend, monkeypatch, tmp_path, "metal")


@pytest.fixture(params=DEVICES)
def machine(
    request: pytest.FixtureRequest,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[SimulatedMac]:
    """Makes an M3 Max and an H200 seem available in turn."""
    # What compiles ahead would need a CUDA toolkit.
    monkeypatch.setattr(at_load, "compile_steps", lambda *_: None)
    monkeypatch.setattr(stock_kernels, "for_race", lambda *_: StockKernels())
    yield from simulated(backend, monkeypatch, tmp_path, request.param)


def simulated(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> Iterator[SimulatedMac]:
    """Makes a device of a back end seem available."""
    simulated = SimulatedMac()
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    backend(None)
    monkeypatch.setattr(selection, "has_device", lambda each: each == name)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(devices, "current", lambda *_: DEVICES[name])
    monkeypatch.setattr(packing, "_on_gpu", lambda: False)
    monkeypatch.setattr(at_load, "clock", simulated.clock)
    monkeypatch.setattr(at_load, "monotonic", lambda: simulated.now)
    monkeypatch.setattr(at_load, "sleep", simulated.pass_by)
    monkeypatch.setattr(forward_race, "passes", simulated.time_passes)
    yield simulated
    forget_process()


def forget_process() -> None:
    """Forgets what a new process would not know."""
    measured_results._of_process.clear()
    state.reset()
