"""Models of checkpoints, evaluated operation by operation."""

import pytest


@pytest.fixture(autouse=True)
def _operation_by_operation(unfused: None) -> None:
    """Has MLX compile no function, which takes longer than these models."""
