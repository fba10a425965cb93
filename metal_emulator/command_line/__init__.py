"""The command `python -m metal_emulator`."""
