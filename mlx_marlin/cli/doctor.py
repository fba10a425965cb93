"""`mlx-marlin doctor`: whether our kernels can run here, and facts for a report."""

import argparse
import json
from collections.abc import Iterable

from mlx_marlin.cli import models
from mlx_marlin.cli.diagnosis import machine
from mlx_marlin.cli.diagnosis.machine import Facts
from mlx_marlin.planning.problem import Problem, problem_of

ROWS = (1, 4, 8)
"""Rows whose kernels are checked, if none are named."""
SIZE = 4096
"""Rows and columns of the weight whose kernels are checked without a model."""
DTYPES = ("float16", "bfloat16")
"""Of activations, likewise."""

EPILOG = """
The exit status is 1 if something prevents our kernels from running, else 0.

examples:
  mlx-marlin doctor
  mlx-marlin doctor --json > report.json
  mlx-marlin doctor --check --model mlx-community/Qwen3-4B-4bit --rows 1,8
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "doctor",
        description="Show versions, device, back end, compilers, caches and what is "
        "known about our kernels, and conclude whether they can run here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    check = parser.add_argument_group("checking kernels")
    check.add_argument(
        "--check", action="store_true", help="check kernels now, before they are used"
    )
    check.add_argument(
        "--model",
        metavar="NAME",
        help="those of an mlx-lm model, folder or name; default: affine 4-bit weights "
        "with groups of 64, in float16 and bfloat16",
    )
    check.add_argument(
        "--rows", help=f"of activations; default: {','.join(map(str, ROWS))}"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something prevents our kernels from running."""
    wanted = problems_to_check(args)
    of_stock = machine.check(wanted) if wanted else []
    facts = machine.collect()
    facts["verdicts"]["stock"] = of_stock
    print(json.dumps(facts, indent=2) if args.json else report(facts))
    return 0 if facts["ok"] else 1


def problems_to_check(args: argparse.Namespace) -> list[Problem]:
    """Returns the products whose kernels are to be checked; none without --check.

    Raises:
        ValueError: If the arguments are wrong, or the model has no product of ours.
    """
    if not args.check:
        for option in ("model", "rows"):
            if (value := getattr(args, option)) is not None:
                raise ValueError(f"--{option} {value} is for --check, expected both")
        return []
    rows = ROWS if args.rows is None else models.rows(args.rows)
    if args.model is None:
        return [problem_of(m, SIZE, SIZE, dtype=each) for each in DTYPES for m in rows]
    return models.problems(args.model, rows)


def report(facts: Facts) -> str:
    """Returns the facts as text, a section each, with the conclusion at the end."""
    sections = {
        "versions": _versions(facts["versions"]),
        "environment": [f"{k}={v}" for k, v in facts["environment"].items()],
        "device": _device(facts["device"]),
        "back end": _back_end(facts["back_end"]),
        "compilers": _compilers(facts["compilers"]),
        "cache": _cache(facts["cache"]),
        "tuned results": _tuned(facts["tuned"]),
        "checked kernels": _verdicts(facts["verdicts"]),
        "conclusion": _conclusion(facts),
    }
    return "\n".join(_section(name, lines) for name, lines in sections.items())


def _section(name: str, lines: Iterable[str]) -> str:
    return "\n".join([name, *(f"  {line}" for line in [*lines] or ["none"])])


def _versions(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    return [f"{name}: {value or 'not installed'}" for name, value in facts.items()]


def _device(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    names = ("variant", "figures", "generation", "tier", "architecture", "source")
    return [f"{name}: {facts[name]}" for name in names if facts.get(name)]


def _back_end(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    return [
        f"{facts['name']}: {facts['reason']}",
        f"MLX's default device: {facts['default_device']}",
        *([f"problem: {facts['problem']}"] if facts["problem"] else []),
    ]


def _compilers(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    reason = facts["unavailable"]
    return [
        *(f"found: {each}" for each in facts["found"]),
        f"used by the emulator: {facts['used'] or 'none'}",
        *([f"the emulator cannot run: {reason}"] if reason else []),
    ]


def _cache(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    return [_folder(each) for each in facts["folders"]]


def _folder(facts: Facts) -> str:
    if facts["rights"] is None:
        return f"{facts['path']}: {facts['problem'] or 'not made yet'}"
    size = f"{facts['bytes'] / 1e6:.1f} MB in {facts['files']} files"
    problem = f", {facts['problem']}" if facts["problem"] else ""
    return f"{facts['path']}: {size}, {facts['rights']}{problem}"


def _tuned(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    lines = [f"{facts['folder']}: {facts['usable']} for this machine"]
    lines += [
        f"{each['name']}: {each['results']} results"
        + (", this machine" if each["this_machine"] else "")
        for each in facts["files"]
    ]
    lines += facts["ignored"]
    return lines if facts["on"] else [*lines, "switched off by MLX_MARLIN_TUNED=0"]


def _verdicts(facts: Facts) -> list[str]:
    if "error" in facts:
        return [facts["error"]]
    kernels = facts["kernels"]
    passed = sum(each["passed"] for each in kernels)
    lines = [f"{passed} of {len(kernels)} sets of kernels passed"] if kernels else []
    lines += [
        f"{each['kernel']} {machine.failure(each)} ({each['example']})"
        for each in kernels
        if not each["passed"]
    ]
    lines += [
        f"stock MLX serves {each['product']}: {each['reason']}"
        for each in facts["stock"]
    ]
    return lines if facts["on"] else [*lines, "kernels are not checked here"]


def _conclusion(facts: Facts) -> list[str]:
    if not facts["ok"]:
        return [*facts["problems"], "see docs/troubleshooting.md"]
    where = {
        "metal": "on this GPU",
        "cuda": "on this GPU",
        "emulator": "in the emulator, which is for tests: stock MLX is faster here",
    }
    return [f"our kernels can run {where[facts['back_end']['name']]}"]
