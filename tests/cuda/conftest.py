"""A machine with a CUDA device whose kernels are recorded."""

import mlx.core as mx
import pytest

from mlx_marlin.backends import devices, selection
from mlx_marlin.products import dispatch
from support.choose import Choose
from support.cuda_launches import H200
from support.recorder import Recorder


@pytest.fixture
def recorder(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Makes a machine with CUDA, whose kernels are recorded and compute zeros."""
    recorder = Recorder()
    backend(None)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.fast, "cuda_kernel", recorder)
    monkeypatch.setattr(devices, "current", lambda *_: H200)
    # Once, and not again without derivatives.
    monkeypatch.setattr(dispatch, "traced", lambda run, _: mx.compile(run))
    assert selection.backend() == "cuda"
    return recorder
