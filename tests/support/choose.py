"""The type of what the fixture `backend` returns."""

from collections.abc import Callable

Choose = Callable[[str | None], None]
"""Sets the back end: "metal", "emulator", "stock", None to choose."""
