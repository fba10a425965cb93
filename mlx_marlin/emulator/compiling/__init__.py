"""Compilers of the emulator, and what they build."""
