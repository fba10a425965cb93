"""Prints how large the package is, and what a first and a later call cost the host.

Lines and files of each room, members of a back end's interface, CPU time of a first
`quantized_matmul` over importing MLX, functions and files that run in a cold and in a
warm call. Graphs are built and not run, so it works on any machine.

Usage: python -m benchmarks.house [--json FILE]
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeGuard

import mlx_marlin

PACKAGE = Path(mlx_marlin.__file__).parent
ROUNDS = 5
INTERFACE = "backends/base.py"
"""The file with the protocols that a back end implements."""
FIRST_CALL = """
import sys, time
import mlx.core as mx
x, native = mx.zeros((3, 128)), mx.quantize(mx.zeros((64, 128)))

def call(x):
    before = time.process_time()
    if len(sys.argv) > 1:
        import mlx_marlin
        mlx_marlin.quantized_matmul(x, *native)
    print((time.process_time() - before) * 1e3)
    return x

mx.export_function(lambda _: None, call, x)  # without a device graphs can be built
"""
FUNCTIONS = """
import sys
from pathlib import Path
import mlx.core as mx
import mlx_marlin
from mlx_marlin.backends.metal import backend
from mlx_marlin.guard import known_answers

package = Path(mlx_marlin.__file__).parent
x, w = (mx.zeros((rows, 4096), mx.float16) for rows in (8, 4096))
native = mx.quantize(w)
mlx_marlin.quantized_matmul  # imports it
chip, gpu = backend.find_device("M3 Max", None), mx.Device(mx.gpu)
backend.detect_device = lambda: chip
mx.default_device = lambda: gpu
mx.metal.is_available = lambda: True
known_answers.fault_of = lambda plan: None  # it would run kernels

def call(x):
    for name in ("cold", "warm"):
        found = set()

        def note(frame, event, _):
            path = Path(frame.f_code.co_filename)
            inside = event == "call" and path.is_relative_to(package)
            if inside and frame.f_code.co_name != "<module>":
                file = path.relative_to(package).as_posix()
                found.add(file + ":" + frame.f_code.co_qualname)

        sys.setprofile(note)
        mlx_marlin.quantized_matmul(x, *native)
        sys.setprofile(None)
        print(name, *sorted(found), sep="|")
    return x

mx.export_function(lambda _: None, call, x)
"""
"""Two calls on a Mac's defaults: no back end is named, nothing was measured, and the
guard is on."""
SETTINGS = {
    "MLX_MARLIN_BACKEND": "metal",
    "MLX_MARLIN_DEVICE": "M3 Max",
    "MLX_MARLIN_TUNED": "0",
    "MLX_MARLIN_GUARD": "0",
}


def rooms() -> dict[str, tuple[int, int]]:
    """Returns lines and files of Python of each folder of the package."""
    found: dict[str, tuple[int, int]] = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "(top)"
        lines, files = found.get(room, (0, 0))
        length = len(file.read_text(encoding="utf-8").splitlines())
        found[room] = (lines + length, files + 1)
    return dict(sorted(found.items()))


def interface_members() -> int:
    """Returns how many members the protocols of a back end have."""
    tree = ast.parse((PACKAGE / INTERFACE).read_text(encoding="utf-8"))
    protocols = (node for node in tree.body if _is_protocol(node))
    return sum(_is_member(each) for node in protocols for each in node.body)


def _is_protocol(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
    )


def _is_member(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name != "__call__"


def _run(program: str, *arguments: str, **settings: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | settings
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout


def first_call_ms() -> float:
    """Returns the median CPU time of importing the package and a first call.

    As where the package is installed, Python finds the bytecode of its files: compiling
    their text takes longer than all else.
    """
    with TemporaryDirectory() as folder:
        bytecode = SETTINGS | {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": folder,
        }
        _run(FIRST_CALL, "ours", **bytecode)  # writes it
        return statistics.median(
            float(_run(FIRST_CALL, "ours", **bytecode)) for _ in range(ROUNDS)
        )


def functions_of_calls() -> dict[str, list[str]]:
    """Returns the functions that run in a cold and in a warm call, as "file:name".

    They are those of a process that finds the verdict on the kernels: an earlier one
    has checked them.
    """
    with TemporaryDirectory() as folder:
        own = {"HOME": folder, "XDG_CACHE_HOME": folder}
        own |= {name: "" for name in os.environ if name.startswith("MLX_MARLIN_")}
        _run(FUNCTIONS, **own)
        rows = (line.split("|") for line in _run(FUNCTIONS, **own).splitlines())
        return {name: functions for name, *functions in rows}


def counted(functions: list[str]) -> tuple[int, int]:
    """Returns how many functions there are, and in how many files."""
    return len(functions), len({each.split(":")[0] for each in functions})


def measured() -> dict[str, object]:
    """Returns all figures."""
    found = rooms()
    emulator = found.get("emulator", (0, 0))
    return {
        "rooms": found,
        "python": sum(lines for lines, _ in found.values()) - emulator[0],
        "files": sum(files for _, files in found.values()) - emulator[1],
        "interface": interface_members(),
        "first_call_ms": round(first_call_ms(), 1),
        "calls": {name: counted(each) for name, each in functions_of_calls().items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    found = measured()
    for room, (lines, files) in rooms().items():
        print(f"{room:20} {lines:6} lines {files:4} files")
    print(
        f"{'beside the emulator':20} {found['python']:6} lines {found['files']:4} files"
    )
    print(f"members of a back end's interface: {found['interface']}")
    print(f"CPU time of a first call over mlx.core: {found['first_call_ms']} ms")
    for name, found_functions in functions_of_calls().items():
        functions, files = counted(found_functions)
        print(f"{name} call: {functions} functions in {files} files")
    if arguments.json:
        text = json.dumps(found, indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
