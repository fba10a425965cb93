"""The package needs nothing of mlx_marlin, and knows nothing of its subject."""

import re
import subprocess
import sys
from pathlib import Path

import metal_emulator
from support.marks import needs_emulator

PACKAGE = Path(metal_emulator.__file__).parent

BLOCKED = "import sys\nsys.modules['mlx_marlin'] = None\n"
USE = """
import metal_emulator
assert not {"numpy", "elftools"} & {*sys.modules}
import mlx.core as mx

one = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
one |= {"inputs": [], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
body = metal_emulator.metal_kernel("body", [], ["y"], "y[0] = 5;")
whole = metal_emulator.library("kernel void f(device float* y) { y[0] = 6; }")
whole.function().check()
with metal_emulator.emulated(trace=True):
    assert [body(**one)[0].item(), whole.function()(**one)[0].item()] == [5, 6]
from metal_emulator import pytest_plugin
from metal_emulator.command_line.main import main
assert main(sys.argv[1:]) == 0
assert [name for name in sys.modules if name[:10] == "mlx_marlin"] == ["mlx_marlin"]
"""


@needs_emulator
def test_kernels_run_where_mlx_marlin_is_blocked(tmp_path: Path) -> None:
    file = tmp_path / "seven.metal"
    file.write_text("y[0] = 7;")
    command = [str(file), "--grid", "1", "--output", "y=1:float32", "--trace"]

    answer = subprocess.run(
        [sys.executable, "-c", BLOCKED + USE, *command], capture_output=True, text=True
    )

    assert answer.stderr == ""
    assert answer.stdout.startswith("y: float32 1, min 7, max 7")


def test_the_former_name_is_an_alias_that_warns() -> None:
    code = "import mlx_marlin.emulator as old, metal_emulator as new; "
    code += "print(old.trace is new.trace)"

    answer = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True
    )

    assert answer.stdout == "True\n"
    assert (
        "DeprecationWarning: mlx_marlin.emulator is now the package metal_emulator: "
        "import metal_emulator" in answer.stderr
    )


OTHER_SUBJECTS = re.compile(
    r"quantiz|quantis|dequant|marlin|gguf|gptq|awq|group_size|zero.point|checkpoint",
    re.IGNORECASE,
)
NAMES_OF_THE_DISTRIBUTION = re.compile(
    r"MLX_MARLIN_CLANG|MLX_MARLIN_BACKEND=stock|mlx-marlin cache"
    r'|distribution `mlx-marlin`|"mlx_marlin-?"|checkout of mlx_marlin'
)
"""What packaging shares: its variables, its cache and its extra."""


def test_no_word_of_quantization_is_in_the_package() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in {".pyc", ""} and "include" not in file.parts:
            continue
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        for number, line in enumerate(text.splitlines(), 1):
            if OTHER_SUBJECTS.search(NAMES_OF_THE_DISTRIBUTION.sub("", line)):
                found.append(f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}")

    assert not found, "\n".join(found)
