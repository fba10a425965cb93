"""Prints how many mutants of a room its tests notice, and the others as differences."""

import argparse
import difflib
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mutants.python import operators, recorded, rooms, runner
from mutants.python.operators import Mutant


def main() -> int:
    """Returns 1 if the rate is below the room's."""
    parser = argparse.ArgumentParser(prog="python -m mutants.python")
    parser.add_argument("room", choices=sorted(rooms.ROOMS))
    parser.add_argument("--sample", type=int, default=150, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--record", type=int, default=0, metavar="N", help="keep N that are noticed"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    room = rooms.ROOMS[options.room]
    files = room.files(runner.ROOT)
    drawn = draw(files, options.sample, f"{options.seed} {options.room}")
    name = f"{options.room.replace('/', '.')}.{options.seed}.jsonl"
    (runner.KEPT / "temporary").mkdir(parents=True, exist_ok=True)
    score: list[float] = []

    def act(tests: runner.Runner) -> None:
        found = tried(tests, drawn, name)
        score.append(told(drawn, found))
        noticed = {m: test for m, test in found.items() if test and "::" in test}
        recorded.write(options.room, dict(list(noticed.items())[: options.record]))

    os.environ["CI"] = "1"  # Hypothesis draws the same examples in every run
    asked = ["-q", "-n", "0", "-p", "no:cacheprovider", "--capture=no", *room.tests]
    pytest.main(asked, plugins=[runner.Runner(files, act, options.processes)])
    shutil.rmtree(runner.KEPT / "temporary", ignore_errors=True)
    return not score or score[0] < room.rate


def draw(files: Sequence[str], number: int, seed: str) -> list[Mutant]:
    """Returns a sample, half of it mutmut's and half our own.

    What of it is in a file changes little with the others.
    """

    def rank(*facts: object) -> bytes:
        return hashlib.sha256(repr((seed, *facts)).encode()).digest()

    root = runner.ROOT
    own = [mutant for file in files for mutant in operators.own(root, file)]
    own.sort(key=lambda mutant: rank(mutant.place, mutant.old, mutant.new))
    chosen = own[: number // 2]
    theirs = [place for file in files for place in operators.mutmuts(root, file)]
    for file, index in sorted(theirs, key=lambda place: rank(*place)):
        if len(chosen) >= number:
            break
        mutant = operators.mutmut(root, file, index)
        chosen += [mutant] if mutant else []
    return chosen


def tried(
    tests: runner.Runner, drawn: Sequence[Mutant], name: str
) -> dict[Mutant, str | None]:
    """Returns what noticed each mutant: "" for nothing, None where no test calls it."""
    called = tests.called
    print(f"{len(called.seconds)} tests, {sum(called.seconds.values()):.0f} s")
    kept = runner.KEPT / name
    rows = kept.read_text().splitlines() if kept.exists() else []
    found = {
        key(fields): verdict
        for fields, verdict, digest in map(json.loads, rows)
        if verdict or digest == called.digest
    }
    known = {
        mutant: found[key(vars(mutant))]
        for mutant in drawn
        if key(vars(mutant)) in found
    }
    todo = [mutant for mutant in drawn if mutant not in known and called.of(mutant)]
    if todo:
        unchanged = replace(todo[0], new=todo[0].old)
        todo.insert(0, unchanged)
    acts = [
        (tests.first_failed(mutant, chosen), called.limit(chosen))
        for mutant in todo
        for chosen in [called.of(mutant)]
    ]
    for done, (number, verdict) in enumerate(
        runner.in_processes(acts, tests.processes)
    ):
        mutant = todo[number]
        if mutant.old == mutant.new:
            if verdict:
                sys.exit(f"The unchanged code fails: {verdict}")
            continue
        known[mutant] = verdict
        with kept.open("a") as file:
            file.write(json.dumps([vars(mutant), verdict, called.digest]) + "\n")
        print(
            f"{done} of {len(todo) - 1}: {place(mutant)}: {verdict or 'SURVIVED'}",
            flush=True,
        )
    return known | {mutant: None for mutant in drawn if mutant not in known}


def key(mutant: dict[str, object]) -> str:
    return json.dumps(mutant, sort_keys=True)


def told(drawn: Sequence[Mutant], found: dict[Mutant, str | None]) -> float:
    """Prints the survivors and the score, and returns the rate."""
    reasons = rooms.equivalents()
    count: Counter[str] = Counter()
    for mutant in drawn:
        verdict = found[mutant]
        if verdict:
            count["killed"] += 1
        elif rooms.row(mutant) in reasons:
            count["equivalent"] += 1
        else:
            count["not covered" if verdict is None else "survived"] += 1
            what = "no test calls it" if verdict is None else "SURVIVED"
            print(f"\n{place(mutant)}: {what}")
            print(difference(mutant))
    rate = count["killed"] / max(1, len(drawn) - count["equivalent"])
    text = ", ".join(f"{value} {name}" for name, value in count.items())
    print(f"\n{len(drawn)} mutants: {text}: {rate:.1%}")
    return rate


def place(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.function} ({mutant.kind})"


def difference(mutant: Mutant) -> str:
    source = (runner.ROOT / mutant.file).read_bytes()
    old, new = (text.decode().splitlines() for text in (source, mutant.apply(source)))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=1))
    return "\n".join(lines[2:])


if __name__ == "__main__":
    sys.exit(main())
