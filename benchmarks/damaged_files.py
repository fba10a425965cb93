"""How long refusing a damaged file takes. Exits 1 when a bound is missed.

Usage: python -m benchmarks.damaged_files
"""

import sys
import time

from benchmarks.bounds import Bound, measure
from mlx_marlin.checkpoints.folder import parse_json

KEYS = 40_000
"""Keys of an object; a comparison of each with each takes 20 s."""
TWICE = Bound(f"a key that occurs twice among {KEYS}", 1.0)


def refuse(text: str) -> None:
    try:
        parse_json(text, "config.json")
    except ValueError:
        return
    raise AssertionError("the file was accepted")


def main() -> int:
    keys = ",".join(f'"{i}":0' for i in range(KEYS))
    text = f'{{{keys},"{KEYS - 1}":0}}'
    return int(not measure(TWICE, lambda: refuse(text), timer=time.process_time))


if __name__ == "__main__":
    sys.exit(main())
