"""The Metal back end, chosen where nothing runs its kernels."""

from collections.abc import Iterator

import pytest

from mlx_marlin import state
from mlx_marlin.backends import selection


@pytest.fixture(scope="module")
def metal() -> Iterator[None]:
    """Sets the back end for the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(selection.ENVIRONMENT, "metal")
        state.reset()
        yield
    state.reset()
