"""Marks of tests that need something which this machine may not have."""

import pytest

import metal_emulator

needs_emulator = pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason="the emulator does not run here"
)
