"""`mlx-marlin emulate FILE`: the command of `python -m metal_emulator FILE`."""

from mlx_marlin.cli.installation import why_missing

try:
    from metal_emulator.command_line.command import (
        DESCRIPTION,
        EPILOG,
        add_arguments,
        run,
    )
except ImportError as error:
    raise ImportError(why_missing(error, "emulator")) from error

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
