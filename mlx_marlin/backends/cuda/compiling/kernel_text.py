"""The text that MLX compiles for a call of a custom kernel, and the names in it.

MLX (0.32.4) finds a compiled kernel by its name and a hash of this text. If the text
differs from MLX's in one character, MLX does not find the kernel and compiles its own.
"""

from dataclasses import dataclass

from mlx_marlin.backends.launch import TemplateValue
from mlx_marlin.backends.source import Source

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInstance:
    """A kernel with template arguments and dtypes, as a compiler sees it.

    Attributes:
        source: The kernel.
        template: Template arguments in the order of the call; a string is a dtype.
        inputs: Dtypes of the inputs.
        outputs: Dtypes of the outputs.
    """

    source: Source
    template: tuple[tuple[str, TemplateValue], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def function(self) -> str:
        """Name of the CUDA function, without its namespace."""
        values = (_in_name(value) for _, value in self.template)
        return f"custom_kernel_{self.source.name}{''.join(values)}"

    @property
    def qualified(self) -> str:
        """Name of the CUDA function in C++."""
        return NAMESPACE + self.function

    def text(self) -> str:
        """Returns the text that MLX compiles.

        Raises:
            ValueError: If the body reads shapes or strides of an input, which MLX
                passes as further parameters.
        """
        source = self.source
        for name in source.input_names:
            for suffix in _SUFFIXES:
                if name + suffix in source.source:
                    raise ValueError(
                        f"the kernel {source.name} reads {name + suffix}, expected a "
                        f"kernel without shapes and strides of its inputs"
                    )
        arrays = zip(source.input_names, self.inputs, strict=True)
        results = zip(source.output_names, self.outputs, strict=True)
        parameters = [
            f"    const {_cuda_type(type_)}* {name}" for name, type_ in arrays
        ]
        parameters += [f"    {_cuda_type(type_)}* {name}" for name, type_ in results]
        constants = [_constant(name, value) for name, value in self.template]
        return "".join(
            (
                _BEFORE,
                source.header,
                _OPENING,
                f"__global__ void {self.function}(\n",
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
