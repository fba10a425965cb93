"""Entry point of `python -m mlx_marlin`."""

from mlx_marlin.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
