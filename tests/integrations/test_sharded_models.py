"""Sharded layers on several processes: `mlx.launch` over loopback, MLX's ring."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import sharded_machine
from support.processes import HANG_SECONDS
from support.profiles import sampled

TESTS = Path(__file__).parents[1]
LAUNCH = Path(sys.executable).with_name("mlx.launch")
CONVERTED = "shards converted layers"
"""What a machine does that calls `optimize` before it shards, and once more after."""

pytestmark = pytest.mark.skipif(
    not (LAUNCH.is_file() and Path("/proc/self/stat").is_file()),
    reason="needs mlx.launch and Linux's /proc",
)


@pytest.fixture
def launched() -> Iterator[Any]:
    """Starts machines in a group of processes of their own; kills what is left."""
    started: list[subprocess.Popen[str]] = []

    def launch(machines: int, *options: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
        environment = {**os.environ, "PYTHONPATH": paths}
        ring = ["-n", str(machines), "--backend", "ring"]
        program = [sys.executable, sharded_machine.__file__, *options]
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *ring, "--", *program],
            env={**environment, "MLX_MARLIN_BACKEND": "emulator"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        for survivor in processes_of(process.pid):
            os.kill(survivor, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = status.read_text().rpartition(")")
        except OSError:  # it ends
            continue
        state, _, _, of_session, *_ = rest.split()
        if int(of_session) == session and state != "Z":
            found.append(int(status.parent.name))
    return found


def objects(output: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that machines print, possibly on one line."""
    decoder = json.JSONDecoder()
    start = output.find("{")
    while start >= 0:
        value, end = decoder.raw_decode(output, start)
        yield value
        start = output.find("{", end)


@pytest.mark.slow
@sampled(0, 1)
@pytest.mark.parametrize(
    ("machines", "layout", "fault"),
    [
        (2, "marlin", "starts late"),
        (2, "marlin", CONVERTED),
        (3, "mlx", CONVERTED),
    ],
)
def test_a_sharded_model_answers_as_the_whole_one(
    launched: Any, machines: int, layout: str, fault: str
) -> None:
    process = launched(machines, layout, fault)
    output, errors = process.communicate(timeout=HANG_SECONDS)

    told = sorted(objects(output), key=lambda each: each["rank"])
    assert [each["rank"] for each in told] == [*range(machines)], errors
    assert processes_of(process.pid) == []
    for each in told:
        assert each["classes"] == [
            "MarlinAllToShardedLinear",
            "MarlinShardedToAllLinear",
        ]
        assert each["served_by"] == ["ours"]
        assert each["error"] < 1e-5
        assert each["error before conversion"] < 1e-5
        packed = fault == CONVERTED and layout == "marlin"
        assert ("shard the model before" in each["sharding packed layers"]) == packed
        # MLX's own errors.
        rows, columns = each["sharding unevenly"]
        assert "Cannot shard the output" in rows
        assert re.search("cannot be sharded|be divisible", columns)
        assert each["restored"]
        assert f"is one of {machines} machines' parts of a layer" in each["saving"]


@pytest.mark.slow
def test_no_machine_outlives_one_that_dies(launched: Any) -> None:
    process = launched(3, "marlin", "dies")

    output, errors = process.communicate(timeout=HANG_SECONDS)

    assert list(objects(output)) == []
    assert "Node with rank 1" in output + errors
    assert processes_of(process.pid) == []
