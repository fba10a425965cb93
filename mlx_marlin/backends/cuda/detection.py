"""Detection of this machine's CUDA device from MLX, the driver and a measurement.

A device of the table has its stated figures, so that plans are reproducible, except for
the number of multiprocessors, which the driver reports. For any other device bandwidth
and throughput are measured once, rounded, and stored in the user's cache.
"""

import ctypes
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_marlin import cache
from mlx_marlin.backends.cuda.device import DEFAULT, CudaDevice, gpus, key
from mlx_marlin.evidence import codec, store
from mlx_marlin.planning.measurement import is_positive

FOLDER = "gpus"
"""Folder of the cache with measured figures."""
DRIVER = "libcuda.so.1"
MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
SHARED_BYTES = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN."""

COPIED = 2**28
"""float16 values that the bandwidth measurement reads: 512 MB, far more than any L2."""
SIDE = 8192
"""Rows, columns and k of the product that measures throughput."""
TRIES = 5
"""Runs of each measurement. The fastest counts, as others may have used the device."""
DIGITS = 2
"""Significant digits of stored figures, so that plans do not depend on noise."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a measurement says of a device."""

    bandwidth_gbs: float
    tflops: float

    def __post_init__(self) -> None:
        if not (is_positive(self.bandwidth_gbs) and is_positive(self.tflops)):
            raise ValueError(f"{self}, expected positive numbers")


def detect_device() -> CudaDevice | None:
    """Returns the CUDA device that MLX computes on; None if there is none."""
    driver = _driver()
    if driver is None:
        return None  # without importing MLX, which is slow
    import mlx.core as mx

    if not mx.cuda.is_available():
        return None
    info = mx.device_info(mx.gpu)
    name = str(info.get("device_name", "")) or DEFAULT.name
    known = gpus().get(key(name))
    device = known or _measured(name, str(info.get("architecture", "")), driver)
    count = _attribute(driver, MULTIPROCESSORS)
    shared = _attribute(driver, SHARED_BYTES) or device.shared_bytes
    if known and count not in (0, known.multiprocessors):
        device = known.with_cores(count)
    return replace(
        device,
        multiprocessors=count or device.multiprocessors,
        shared_bytes=shared,
    )


def driver_version() -> int:
    """Returns the version of the CUDA driver, such as 13000; 0 without a driver."""
    driver = _driver()
    return 0 if driver is None else _version(driver)


def _driver() -> Any:
    """Returns the initialized driver library; None if there is none."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _attribute(driver: Any, attribute: int) -> int:
    """Returns an attribute of the driver's first device; 0 if the query fails."""
    value, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return 0
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return 0 if failed else value.value


def _version(driver: Any) -> int:
    value = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(value))
    return value.value


def _measured(name: str, arch: str, driver: Any) -> CudaDevice:
    """Returns a device that is not in the table, with measured or default figures."""
    import mlx.core as mx

    version = mx.__version__  # type: ignore[attr-defined]
    file_name = _file_name(f"{name}, driver {_version(driver)}, MLX {version}")
    found = _read(file_name)
    if found is None:
        try:
            with mx.stream(mx.gpu):
                found = Figures(_bandwidth_gbs(), _tflops())
        except (RuntimeError, ValueError, MemoryError):  # no memory, or MLX is tracing
            return replace(DEFAULT, name=name, arch=arch or DEFAULT.arch)
        _write(file_name, found)
    return CudaDevice(
        name=name,
        variant=f"{name}, measured",
        multiprocessors=DEFAULT.multiprocessors,
        shared_bytes=DEFAULT.shared_bytes,
        arch=arch or DEFAULT.arch,
        bandwidth_gbs=found.bandwidth_gbs,
        tflops=found.tflops,
    )


def _bandwidth_gbs() -> float:
    """Returns the bandwidth at which MLX reads a large array, in GB/s."""
    values = _random(COPIED)
    return _rounded(values.nbytes / _seconds(lambda: values.max()) / 1e9)


def _tflops() -> float:
    """Returns the throughput of MLX's float16 product, in TFLOP/s."""
    a = _random(SIDE, SIDE)
    return _rounded(2 * SIDE**3 / _seconds(lambda: a @ a) / 1e12)


def _random(*shape: int) -> Any:
    """Returns random float16 values; a device may be faster on zeros."""
    import mlx.core as mx

    return mx.random.uniform(-1, 1, shape, mx.float16, key=mx.random.key(0))


def _seconds(make: Any) -> float:
    """Returns the shortest time of `TRIES` runs, after one that compiles."""
    import time

    import mlx.core as mx

    mx.eval(make())
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        mx.eval(make())
        times.append(time.perf_counter() - start)
    return min(times)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _file_name(device: str) -> str:
    """Returns the name of the file with the measured figures of a device."""
    return f"{hashlib.sha256(device.encode()).hexdigest()[:16]}.json"


def _read(file_name: str) -> Figures | None:
    """Returns stored figures; None, with a warning, if they are invalid."""
    file = cache.folder(FOLDER) / file_name
    return store.read(file, Figures, "the measured speed of a GPU")


def _write(file_name: str, figures: Figures) -> None:
    """Stores figures. If that fails, the next process measures again."""
    content = json.dumps(codec.encoded(figures)).encode()
    with suppress(OSError):
        cache.write(cache.folder(FOLDER), file_name, content)
