"""`mlx-marlin doctor`: reports whether our kernels can run on this machine."""

import argparse

from mlx_marlin.cli import arguments, cache, doctor_facts, models, output
from mlx_marlin.cli.cache import CacheFolder
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


TITLES = {
    "back_end": "back end",
    "tuned": "measured results",
    "verdicts": "checked kernels",
}
"""Headings of sections that are not the keys of the facts."""


def report(facts: Facts) -> str:
    """Returns the facts as text, in sections, with the conclusion at the end."""
    own = {"cache": _cache, "tuned": _tuned, "verdicts": _verdicts}
    sections = {
        TITLES.get(name, name): [part["error"]]
        if "error" in part
        else own.get(name, _listed)(part)
        for name, part in facts.items()
        if isinstance(part, dict)
    }
    sections["conclusion"] = _conclusion(facts)
    return "\n".join(
        line
        for name, lines in sections.items()
        for line in (name, *(f"  {line}" for line in lines or ["none"]))
    )


def _listed(facts: Facts) -> list[str]:
    return [f"{name}: {'-' if v is None else v}" for name, v in facts.items()]


def _cache(facts: Facts) -> list[str]:
    folders = [CacheFolder(**each) for each in facts["folders"]]
    return cache.listing(folders).splitlines()


def _tuned(facts: Facts) -> list[str]:
    lines = [
        facts["folder"],
        *_measured(facts["products"], "product", "{} of them"),
        *_measured(facts["models"], "model", "some rows of {}"),
    ]
    for each in facts["settings"]:
        lines.append(f"{each['model']}: {each['settings']}, {each['reason']}")
        value = each["max_ops_per_buffer"]
        if facts["on"] and value is not None and facts["value_here"] != str(value):
            lines.append(
                f"  with export {facts['variable']}={value} before MLX starts it is "
                f"faster; `mlx-marlin lm` sets it"
            )
    for file in facts["files"]:
        count = file["results"]
        said = "not readable" if count is None else f"{count} results"
        own = ", this machine" if file["this_machine"] else ""
        lines.append(f"{file['name']}: {said}{own}")
    return [*lines, *facts["ignored"], *([] if facts["on"] else [OFF])]


def _measured(facts: Facts, name: str, of: str) -> list[str]:
    """Returns how many were measured on this machine, when, and who serves them."""
    count, stock = facts["count"], facts["served_by_stock"]
    if not count:
        return [f"no {name} measured on this machine"]
    days = " to ".join(dict.fromkeys([facts["first"], facts["last"]]))
    served = f"stock MLX serves {of.format(stock)}" if stock else "our kernels serve"
    return [f"{count} {name}{'s' * (count > 1)} measured here, {days}: {served}"]


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
