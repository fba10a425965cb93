"""The text that MLX compiles for a call of a custom kernel, and the names in it.

MLX (0.32.4) finds a compiled kernel by its name and a hash of this text. If the text
differs from MLX's in one character, MLX does not find the kernel and compiles its own.
"""

from mlx_marlin.backends.launch import Launch, TemplateValue

NAMESPACE = "mlx::core::cu::"
INCLUDED = "mlx/backend/cuda/device/utils.cuh"
"""The header of MLX that each text includes; it is part of MLX's library."""
_BEFORE = f'\n#include "{INCLUDED}"\n\n#include <cooperative_groups.h>\n\n'
_OPENING = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
_CLOSING = "\n}\n\n} // namespace mlx::core::cu\n"
_SUFFIXES = ("_shape", "_strides", "_ndim")
"""MLX adds parameters for an input whose name the body uses with one of these."""
_CUDA_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "bool_": "bool",
    "bool": "bool",
}
"""CUDA's names of dtypes other than integers."""
_NAMES = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}
"""How MLX writes dtypes of template arguments into a kernel's name."""


def function(launch: Launch) -> str:
    """Returns the name of the CUDA function of a launch, without its namespace."""
    values = (_in_name(value) for _, value in launch.template)
    return f"custom_kernel_{launch.source.name}{''.join(values)}"


def qualified(launch: Launch) -> str:
    """Returns the name of the CUDA function of a launch in C++."""
    return NAMESPACE + function(launch)


def text(launch: Launch) -> str:
    """Returns the text that MLX compiles for a launch."""
    source = launch.source
    for name in source.input_names:
        for suffix in _SUFFIXES:
            if name + suffix in source.source:
                raise ValueError(
                    f"the kernel {source.name} reads {name + suffix}, expected a "
                    f"kernel without shapes and strides of its inputs"
                )
    arrays = zip(source.input_names, launch.dtypes, strict=True)
    results = zip(source.output_names, launch.outputs, strict=True)
    parameters = [f"    const {_cuda_type(dtype)}* {name}" for name, dtype in arrays]
    parameters += [f"    {_cuda_type(each.dtype)}* {name}" for name, each in results]
    constants = [_constant(name, value) for name, value in launch.template]
    return "".join(
        (
            _BEFORE,
            source.header,
            _OPENING,
            f"__global__ void {function(launch)}(\n",
            ",\n".join(parameters),
            ") {\n",
            *constants,
            "\n" if constants else "",
            source.source,
            _CLOSING,
        )
    )


def _in_name(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return "_t" if value else "_f"
    if isinstance(value, str):
        return f"_{_NAMES.get(value, f'{value}_t')}"
    return f"_{value}"


def _constant(name: str, value: TemplateValue) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, str):
        return f"  using {name} = {_cuda_type(value)};\n"
    return f"  constexpr int {name} = {value};\n"


def _cuda_type(dtype: str) -> str:
    return _CUDA_TYPES.get(dtype, f"{dtype}_t")
