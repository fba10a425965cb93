"""`mlx-marlin doctor`: reports whether our kernels can run on this machine."""

import argparse
from collections.abc import Callable, Iterable

from mlx_marlin.cli import arguments, doctor_facts, models, output
from mlx_marlin.cli.cache import size_text
from mlx_marlin.cli.doctor_facts import Facts
from mlx_marlin.planning.problem import Problem, problem_of

ROWS = (1, 4, 8)
"""Default of --rows."""
SIZE = 4096
"""Rows and columns of the weight that is checked without --model."""
DTYPES = ("float16", "bfloat16")
"""Dtypes of activations that are checked without --model."""
OFF = "switched off by MLX_MARLIN_TUNED=0"
"""Said of results that are there and not used."""

DESCRIPTION = """
Show versions, the device, the back end, compilers, the cache, measured results and
checked kernels, and conclude whether the kernels of this package can run here.
"""
EPILOG = """
The exit status is 1 if the kernels of this package cannot run, and 0 otherwise.

examples:
  mlx-marlin doctor
  mlx-marlin doctor --json > report.json
  mlx-marlin doctor --check --model mlx-community/Qwen3-4B-4bit --rows 1,8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    output.add_json(parser)
    check = parser.add_argument_group("checking kernels")
    check.add_argument(
        "--check", action="store_true", help="check kernels before their first use"
    )
    check.add_argument(
        "--model",
        metavar="NAME",
        help="check the kernels of a model: a name, folder or GGUF file; default: "
        "those of affine 4-bit weights with groups of 64, in float16 and bfloat16",
    )
    arguments.add_rows(check, ROWS)


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if our kernels cannot run."""
    products = problems_to_check(args)
    served_by_stock = doctor_facts.check(products) if products else []
    facts = doctor_facts.collect()
    facts["verdicts"]["stock"] = served_by_stock
    output.write_json(args, facts)
    print(report(facts))
    return 0 if facts["ok"] else 1


def problems_to_check(args: argparse.Namespace) -> list[Problem]:
    """Returns the products whose kernels to check; none without --check."""
    if not args.check:
        for option in ("model", "rows"):
            if (value := getattr(args, option)) is not None:
                raise ValueError(f"--{option} {value} requires --check")
        return []
    rows = ROWS if args.rows is None else arguments.numbers(args.rows)
    if args.model is None:
        return [
            problem_of(m, SIZE, SIZE, dtype=dtype) for dtype in DTYPES for m in rows
        ]
    models.check(args.model)
    return models.problems(args.model, rows)


def report(facts: Facts) -> str:
    """Returns the facts as text, in sections, with the conclusion at the end."""
    sections: dict[str, tuple[Facts, Callable[[Facts], list[str]]]] = {
        "versions": (facts["versions"], _listed),
        "environment": (facts["environment"], _listed),
        "device": (facts["device"], _listed),
        "back end": (facts["back_end"], _listed),
        "compilers": (facts["compilers"], _listed),
        "cache": (facts["cache"], _cache),
        "measured results": (facts["tuned"], _tuned),
        "measured models": (facts["models"], _models),
        "checked kernels": (facts["verdicts"], _verdicts),
        "conclusion": (facts, _conclusion),
    }
    return "\n".join(
        _section(name, [part["error"]] if "error" in part else lines(part))
        for name, (part, lines) in sections.items()
    )


def _section(name: str, lines: Iterable[str]) -> str:
    return "\n".join([name, *(f"  {line}" for line in [*lines] or ["none"])])


def _listed(facts: Facts) -> list[str]:
    return [f"{name}: {'-' if v is None else v}" for name, v in facts.items()]


def _cache(facts: Facts) -> list[str]:
    return [_folder(folder) for folder in facts["folders"]]


def _folder(facts: Facts) -> str:
    if facts["rights"] is None:
        return f"{facts['path']}: {facts['problem'] or 'not created yet'}"
    size = f"{size_text(facts['bytes'])} in {facts['files']} files"
    problem = f", {facts['problem']}" if facts["problem"] else ""
    return f"{facts['path']}: {size}, {facts['rights']}{problem}"


def _tuned(facts: Facts) -> list[str]:
    lines = [facts["folder"]]
    lines += _measured(facts["products"], "product", "{} of them")
    lines += _measured(facts["models"], "model", "some rows of {}")
    lines += [
        f"{file['name']}: {file['results']} results"
        + (", this machine" if file["this_machine"] else "")
        for file in facts["files"]
    ]
    lines += facts["ignored"]
    return lines if facts["on"] else [*lines, OFF]


def _measured(facts: Facts, name: str, of: str) -> list[str]:
    """Returns how many were measured on this machine, when, and who serves them."""
    count, stock = facts["count"], facts["served_by_stock"]
    if not count:
        return [f"no {name} measured on this machine"]
    days = " to ".join(dict.fromkeys([facts["first"], facts["last"]]))
    served = f"stock MLX serves {of.format(stock)}" if stock else "our kernels serve"
    return [f"{count} {name}{'s' * (count > 1)} measured here, {days}: {served}"]


def _models(facts: Facts) -> list[str]:
    lines: list[str] = []
    for each in facts["models"]:
        lines.append(f"{each['model']}: {each['settings']}, {each['reason']}")
        value = each["max_ops_per_buffer"]
        is_missing = value is not None and facts["value_here"] != str(value)
        if is_missing and facts["on"]:
            lines.append(
                f"  with export {facts['variable']}={value} before MLX starts it is "
                f"faster; `mlx-marlin lm` sets it"
            )
    lines += facts["ignored"]
    return lines if facts["on"] else [*lines, OFF]


def _verdicts(facts: Facts) -> list[str]:
    checked = facts["kernels"]
    passed = sum(kernel["passed"] for kernel in checked)
    lines = [f"{passed} of {len(checked)} sets of kernels passed"] if checked else []
    lines += [
        f"{kernel['kernel']} {doctor_facts.failure(kernel)} ({kernel['example']})"
        for kernel in checked
        if not kernel["passed"]
    ]
    lines += [
        f"stock MLX serves {product['product']}: {product['reason']}"
        for product in facts["stock"]
    ]
    if facts["on"]:
        return lines
    return [*lines, doctor_facts.when_unchecked(facts.get("setting"))]


def _conclusion(facts: Facts) -> list[str]:
    if not facts["ok"]:
        return [*facts["problems"], "see docs/troubleshooting.md"]
    where = {
        "metal": "on this GPU",
        "cuda": "on this GPU",
        "emulator": "in the emulator, which is for tests: stock MLX is faster here",
    }
    return [f"our kernels can run {where[facts['back_end']['name']]}"]
