"""Today's models in every container load and convert, and compute the same.

`python -m benchmarks.model_containers` prints a table of all of them.
"""

from pathlib import Path

import pytest

from support.containers import CONTAINERS, GGUF, MLX, PAIRS, STEPS, Checkpoint
from support.profiles import sampled

NOT_IN_MLX = {
    "ModelOpt": "MLX's linear layers have no global scale",
    GGUF: "MLX's layers take columns in the order of x (act-order)",
}
"""Why MLX's layout may be refused, by container."""
REORDERED = ("Qwen3.5-9B", "Qwen3.5-35B-A3B")
"""Models whose GGUF files have columns in another order."""


def test_the_64_configurations_are_in_every_container() -> None:
    names = dict.fromkeys(name for name, _ in PAIRS)
    assert len(names) == 64
    assert {*PAIRS} >= {(name, each) for name in names for each in (*CONTAINERS, MLX)}


@sampled(10, 40)
@pytest.mark.parametrize(("name", "container"), PAIRS)
def test_a_model_computes_the_same_in_every_container_and_layout(
    name: str, container: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(name, container, tmp_path)

    found = {step: checkpoint.outcome(step) for step in STEPS}

    mlx, refused = found.pop("mlx"), container == "ModelOpt" or name in REORDERED
    assert found == {"load": "", "marlin": ""}
    if refused and container in NOT_IN_MLX:
        assert mlx.startswith("refused: ")
        assert mlx.endswith(NOT_IN_MLX[container])
    else:
        assert mlx == ""
