"""Converting takes the memory of few tensors, not of the model."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_marlin.checkpoints.shards import Shards
from support.foreign_models import CONFIG, shapes

WIDE, LAYERS = 2048, 9
PROGRAM = """
import resource, sys
from pathlib import Path
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
import mlx_lm.models.llama, mlx_lm.utils

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
how = Quantization(quantizer=sys.argv[3]) if len(sys.argv) > 3 else None
layout = "mlx" if how is None else "marlin"
source = open_source(Path(sys.argv[1]))
for row in convert(source, Path(sys.argv[2]), layout=layout, quantization=how):
    pass
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 9 layers, 0.5 GB, whose largest weights have 8 MB."""
    path = tmp_path_factory.mktemp("large")
    sizes = {
        "hidden_size": WIDE,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
    }
    config = CONFIG | sizes
    (path / "config.json").write_text(json.dumps(config))
    matrix = mx.random.normal((WIDE, WIDE), mx.float16)
    arrays = {
        f"{name}.weight": matrix[: shape[0]] if len(shape) == 2 else matrix[0]
        for name, shape in shapes(config).items()
    }
    with Shards(path, [*arrays], {}) as shards:
        for name, array in arrays.items():
            shards.add(name, array)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", [None, "nearest"])
def test_memory_is_that_of_few_tensors(
    large_llama: Path, tmp_path: Path, quantizer: str | None
) -> None:
    command = [sys.executable, "-c", PROGRAM, large_llama, tmp_path / "result"]
    done = subprocess.run(
        [*command, *([quantizer] if quantizer else [])],
        capture_output=True,
        text=True,
        check=True,
    )
    total = sum(file.stat().st_size for file in large_llama.iterdir())
    bound = 3 * 2 * WIDE * WIDE + 200_000_000
    assert total > 2 * bound
    assert int(done.stdout) < bound
