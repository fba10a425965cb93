"""The CUDA text as NVIDIA's own compiler takes it: no GPU is needed, but `nvcc`.

On the CPU stand-ins take the place of what is one instruction each, in
`shaders/cuda/instructions.cuh` and `warpgroup.cuh`. Here these compile too, and the
compiler tells what does not fit into registers.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.build import TemplateValue, weight_template
from mlx_marlin.backends.cuda import launches as cuda_arguments
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import problem_of
from support.profiles import sampled

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")

TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
SERIALIZED = re.compile(r"C75\d\d")
"""What ptxas warns of: products of warpgroups that wait for each other."""
STORES = re.compile(r"\bst\.global(?:\.v(\d))?\.[a-z](\d+)")
SPILLED = re.compile(r"(\d+) bytes spill stores")
MOST_SPILLED = 112
"""Bytes a thread: what is stored before the main loop and loaded behind it. Heads of 64
rows have most, because their plan is the fastest in a chain with 80 registers."""
LARGE = {"n": 28672, "k": 8192, "layout": "marlin"}
FIRST, LAST = {"LAST": False}, {"LAST": True}
HEADS = Rotation(features=128, columns=5120, per_row=True)
NORMED_HEADS = replace(HEADS, norm=1e-6, queries=4096)
H200, A100 = "NVIDIA H200", "NVIDIA A100"

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "few rows": (H200, LARGE | {"m": 8, "group_size": 128}),
    "16 rows": (H200, LARGE | {"m": 16, "group_size": 128}),
    "16 rows, groups of 64": (H200, LARGE | {"m": 16, "dtype": "bfloat16"}),
    "32 rows": (H200, LARGE | {"m": 32, "group_size": 128}),
    "64 rows": (H200, LARGE | {"m": 64, "group_size": 128}),
    "8 bits": (H200, LARGE | {"m": 24, "bits": 8}),
    "3 bits": (H200, LARGE | {"m": 8, "bits": 3, "group_size": 32}),
    "mxfp4": (H200, LARGE | {"m": 12, "mode": "mxfp4", "dtype": "bfloat16"}),
    "nvfp4": (H200, LARGE | {"m": 40, "mode": "nvfp4"}),
    "symmetric": (H200, LARGE | {"m": 3, "mode": "symmetric", "group_size": 128}),
    "native": (H200, LARGE | {"m": 5, "layout": "mlx", "dtype": "bfloat16"}),
    "gate and up": (
        H200,
        LARGE | {"m": 32, "epilogue": Epilogue(activation="silu", gated=True)},
    ),
    "gate and up of normalized rows": (
        H200,
        {"m": 8, "n": 28672, "k": 4096, "layout": "marlin", "norm": 1e-5}
        | {"epilogue": Epilogue(activation="silu", gated=True)},
    ),
    "parts": (
        H200,
        {"m": 2, "n": 6144, "k": 4096, "layout": "marlin"}
        | {"epilogue": Epilogue(bias=True, parts=(4096, 1024, 1024))},
    ),
    "rotated heads of normalized rows": (
        H200,
        {"m": 8, "n": 6144, "k": 4096, "layout": "marlin", "norm": 1e-5}
        | {"epilogue": Epilogue(rotation=HEADS, parts=(4096, 1024, 1024))},
    ),
    "normalized and rotated heads of 64 rows": (
        H200,
        {"m": 64, "n": 6144, "k": 4096, "layout": "marlin"}
        | {"epilogue": Epilogue(bias=True, rotation=NORMED_HEADS)},
    ),
    "split": (H200, {"m": 2, "n": 256, "k": 16384, "layout": "marlin"}),
    "an older device": (A100, LARGE | {"m": 24}),
}


def compiled(
    text: Source,
    plan: Plan | GatherPlan | DequantizePlan,
    device: CudaDevice,
    folder: Path,
    template: dict[str, TemplateValue],
    result: str | None = None,
) -> str:
    """Compiles a kernel as MLX writes it, and returns what the compiler says."""
    dtype = TYPES[plan.problem.dtype]
    scale = TYPES.get(plan.problem.scale_dtype, "uint8_t")
    types = {"w": "uint32_t", "scales": scale, "biases": scale, "numbers": "int32_t"}
    types |= {
        "shape": "int32_t",
        "partials": "float",
        "positions": "int32_t",
        "freqs": "float",
    }
    types |= {"experts": "uint32_t", "sources": "uint32_t"}
    types |= {"second": "uint32_t", "second_scales": scale}
    types |= {"scores": "float"}
    arguments = [f"const {types.get(each, dtype)}* {each}" for each in text.input_names]
    written = {"experts": "uint32_t", "scores": "float", "out": result or dtype}
    arguments += [f"{written.get(each, dtype)}* {each}" for each in text.output_names]
    lines = [
        f"using {name} = {TYPES[value]};"
        if isinstance(value, str)
        else f"constexpr {type(value).__name__} {name} = {int(value)};"
        for name, value in template.items()
    ]
    file = folder / "kernel.cu"
    file.write_text(
        f"#include <cstdint>\n{text.header}\n"
        f"__global__ void kernel({', '.join(arguments)}) {{\n"
        + "\n".join([*lines, text.source])
        + "\n}\n"
    )
    number = "".join(map(str, device.capability))
    arch = f"sm_{number}a" if device.capability == (9, 0) else f"sm_{number}"
    command = [str(NVCC), "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas", "-v"]
    command += ["-cubin", "-keep", "-keep-dir", str(folder)]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin"), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout + done.stderr


@sampled(1, 6)
@pytest.mark.parametrize("name", PLANS)
def test_a_kernel_compiles_and_its_registers_suffice(name: str, tmp_path: Path) -> None:
    device_name, asked = PLANS[name]
    device = CudaDevice.named(device_name)
    overrides = {"strategy": "split_k", "k_parallel": 4} if name == "split" else {}
    plan = planner.make(problem_of(**asked), device=device, **overrides)

    said = compiled(
        cuda_source.of_product(plan),
        plan,
        device,
        tmp_path,
        cuda_arguments.product_template(plan),
        "float" if plan.is_split else None,
    )

    assert not SERIALIZED.search(said), said
    assert max(map(int, SPILLED.findall(said))) <= MOST_SPILLED, said
    assert plan.needs_second_pass == (name == "split")
    if plan.needs_second_pass:
        template = cuda_arguments.reduce_template(plan)
        compiled(cuda_source.of_reduce(plan), plan, device, tmp_path, template)


@sampled(1)
@pytest.mark.parametrize(
    ("body", "template"),
    [
        (
            "route",
            {"T": "float16", "EXPERTS": 1024, "EACH": 32, "OF_ALL": True} | FIRST,
        ),
        ("route", {"T": "bfloat16", "EXPERTS": 60, "EACH": 4, "OF_ALL": False} | LAST),
        ("combine", {"T": "bfloat16", "N": 2880, "EACH": 8}),
    ],
)
def test_routing_compiles(
    body: str, template: dict[str, TemplateValue], tmp_path: Path
) -> None:
    plan = planner.make(problem_of(8, 64, 64, dtype=template["T"]))
    text = cuda_source.routing_source(body)
    said = compiled(text, plan, CudaDevice.named(H200), tmp_path, template)
    assert max(map(int, SPILLED.findall(said))) == 0, said


@sampled(1)
@pytest.mark.parametrize(
    ("pairs", "each", "gate", "bias"),
    [
        (8, 8, "silu", False),
        (128, 0, None, False),
        (4096, 1, "silu", False),
        (16, 4, "swiglu_oai", True),
        (16, 1, None, True),
    ],
)
def test_experts_compile_and_their_registers_suffice(
    pairs: int, each: int, gate: str | None, bias: bool, tmp_path: Path
) -> None:
    device = CudaDevice.named(H200)
    problem = problem_of(pairs, 768, 2048, layout="marlin")
    gather = GatherProblem(
        problem=problem, experts=128, pairs_per_row=each, gate=gate, bias=bias
    )
    plan = planner.choose_gather(gather, device)
    text = cuda_source.gather_source(plan)

    template = cuda_arguments.gather_template(plan)
    said = compiled(text, plan, device, tmp_path, template)

    assert max(map(int, SPILLED.findall(said))) <= MOST_SPILLED, said


@sampled(1)
@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "bfloat16"},
        {"group_size": 32, "bits": 3},
        {"mode": "nvfp4", "group_size": 16},
        {"layout": "mlx"},
    ],
    ids=str,
)
def test_a_decoded_weight_is_stored_by_16_bytes(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    problem = problem_of(**(LARGE | {"m": 512} | asked))
    plan = dequantize_plan(problem)
    text, template = cuda_source.of_dequantize(problem), weight_template(problem)

    said = compiled(text, plan, CudaDevice.named(H200), tmp_path, {**template})

    assert max(map(int, SPILLED.findall(said))) == 0, said
    stores = STORES.findall((tmp_path / "kernel.ptx").read_text())
    assert {int(count or 1) * int(bits) for count, bits in stores} == {128}
