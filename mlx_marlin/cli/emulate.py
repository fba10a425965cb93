"""`mlx-marlin emulate FILE`: the command of `python -m metal_emulator FILE`."""

from metal_emulator.command_line.command import (
    DESCRIPTION,
    EPILOG,
    add_arguments,
    run,
)

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
