"""Entry point of `python -m mlx_marlin`."""

from mlx_marlin.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
