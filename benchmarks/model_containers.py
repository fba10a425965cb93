"""Today's models in every container: which load, convert and compute the same.

    python -m benchmarks.model_containers [MODEL ...]

Builds a tiny random checkpoint of each configuration in each container, loads it,
converts it to both layouts, loads the results, and compares the logits with those of
mlx-lm's model with the decoded weights. Exits 1 if any is wrong.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.configurations import CONFIGURATIONS
from support.containers import CONTAINERS, GGUF, MLX, PAIRS, REFUSED, STEPS, Checkpoint

COLUMNS = [*CONTAINERS, MLX, GGUF]
LONGEST = 200
"""Letters of a message."""
Found = Mapping[tuple[str, str], list[str]]
"""Outcomes by configuration and container, one for each of `STEPS`."""


def outcomes(name: str, container: str) -> list[str]:
    """Returns what became of a checkpoint in each of `STEPS`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(name, container, Path(folder))
        found = []
        for step in STEPS:
            try:
                found.append(checkpoint.outcome(step))
            except Exception as error:  # of any library: the table shows it
                found.append(f"wrong: {error!r}")
        return found


def letter(outcome: str) -> str:
    if not outcome:
        return "+"
    return "r" if outcome.startswith(REFUSED) else "W"


def table(found: Found) -> str:
    """Returns a line for each configuration, and a cell for each container."""
    names = dict.fromkeys(name for name, _ in found)
    rows = [["", *COLUMNS]]
    rows += [
        [name, *("".join(map(letter, found.get((name, c), ()))) for c in COLUMNS)]
        for name in names
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def messages(found: Found) -> str:
    """Returns each message once, without tensors' names, and some whom it is about."""
    about: dict[str, list[str]] = defaultdict(list)
    for (name, container), own in found.items():
        for step, outcome in zip(STEPS, own, strict=True):
            if outcome:
                kind = re.sub(r"'[\w.]+\.(weight|bias)'", "...", outcome)
                about[kind[:LONGEST]].append(f"{name} {container} {step}")
    return "\n".join(
        f"{message}\n    {len(pairs)}: {', '.join(pairs[:3])}"
        for message, pairs in sorted(about.items(), key=lambda item: -len(item[1]))
    )


def main() -> int:
    """Prints the table; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"one of {', '.join(CONFIGURATIONS)}")
    names = parser.parse_args().model or [*CONFIGURATIONS]
    if unknown := set(names) - CONFIGURATIONS.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    mx.disable_compile()  # MLX would compile each function by g++ on a CPU
    pairs = [pair for pair in PAIRS if pair[0] in names]
    bar = tqdm(pairs, unit="checkpoint", disable=None)
    found = {pair: outcomes(*pair) for pair in bar}
    print(f"{', '.join(STEPS)}: + right, r refused, W wrong\n")
    print(table(found), messages(found), sep="\n\n")
    counts = Counter(letter(each) for own in found.values() for each in own)
    print(f"\n{len(found)} checkpoints: {dict(counts)}")
    return int(counts["W"] > 0)


if __name__ == "__main__":
    sys.exit(main())
