"""Whole kernels with signatures, called from the body of a custom kernel.

`mx.fast.metal_kernel` generates the signature and takes only a body. A file with
`kernel void f(...)` therefore becomes the header, and the body calls `f`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from metal_emulator.language.tokens import Tokens

T = TypeVar("T")

_ATTRIBUTE = re.compile(r"\[\[\s*(?P<name>\w+)\s*(?:\(.*?\)\s*)?\]\]", re.DOTALL)
_SIZE = re.compile(r"[23]$")
_VECTOR = re.compile(r"[234](x[234])?$")
_DTYPES = {
    "float": mx.float32,
    "half": mx.float16,
    "bfloat": mx.bfloat16,
    "short": mx.int16,
    "ushort": mx.uint16,
    "int": mx.int32,
    "uint": mx.uint32,
    "long": mx.int64,
    "ulong": mx.uint64,
}
"""Element types that are checked against the array's dtype; others are not."""
_MEMORY = frozenset({"buffer", "threadgroup"})
_TRIPLES = frozenset(
    {"thread_position_in_grid", "thread_position_in_threadgroup"}
    | {"threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid"}
    | {"threads_per_threadgroup", "dispatch_threads_per_threadgroup"}
    | {"grid_size", "grid_origin"}
)
"""Attributes that MLX declares as uint3; it declares the others as uint."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
        type: The text before the name, including `*` or `&`.
        name: The name.
        attribute: The Metal attribute without arguments, or "".
    """

    type: str
    name: str
    attribute: str

    @property
    def is_built_in(self) -> bool:
        """Whether the GPU sets its value."""
        return self.attribute != "" and self.attribute not in _MEMORY


@dataclass(frozen=True)
class WholeKernel:
    """A kernel function of a text.

    Attributes:
        name: The name.
        template: Names of the template parameters, in order.
        parameters: The parameters, in order.
    """

    name: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def call(
        self,
        inputs: Mapping[str, object],
        outputs: Mapping[str, object],
        threadgroup_bytes: Mapping[str, int],
    ) -> str:
        """Returns the body of a custom kernel that calls this one.

        Args:
            inputs: Arrays and numbers by name.
            outputs: Outputs by name.
            threadgroup_bytes: Sizes of the parameters in threadgroup memory.

        Raises:
            ValueError: If a parameter has no value.
        """
        arguments, declarations = [], []
        for parameter in self.parameters:
            name = parameter.name
            if parameter.is_built_in:
                arguments.append(_built_in(parameter))
            elif parameter.attribute == "threadgroup":
                size = _lookup(self.name, name, threadgroup_bytes, "threadgroup memory")
                declarations.append(f"threadgroup float4 {name}[{-(-size // 16)}];\n")
                arguments.append(f"({parameter.type}){name}")
            elif name in outputs:
                arguments.append(f"({parameter.type}){name}")
            else:
                value = _lookup(self.name, name, inputs, "an input or output")
                arguments.append(_argument(self.name, parameter, value))
        instance = f"<{', '.join(self.template)}>" if self.template else ""
        return f"{''.join(declarations)}{self.name}{instance}({', '.join(arguments)});"

    def instance(self, values: Iterable[mx.Dtype | int]) -> list[str]:
        """Returns the name of the template's instance, for the static check.

        Args:
            values: Template arguments, in order.

        Returns:
            One name, or no name if the kernel is not a template.
        """
        if not self.template:
            return []
        return [f"{self.name}<{', '.join(map(_metal, values))}>"]


def _metal(value: mx.Dtype | int) -> str:
    """Returns a template argument as Metal text."""
    if isinstance(value, mx.Dtype):
        name = str(value).removeprefix("mlx.core.")
        return name if name == "bool" else {"float32": "float"}.get(name, f"{name}_t")
    return str(value).lower()


def _lookup(kernel: str, name: str, values: Mapping[str, T], kind: str) -> T:
    if name not in values:
        raise ValueError(
            f"kernel {kernel}: parameter {name!r} needs {kind} of its name"
        )
    return values[name]


def _built_in(parameter: Parameter) -> str:
    """Returns an attribute, converted to the parameter's type."""
    value = parameter.attribute
    if value in _TRIPLES:
        size = _SIZE.search(parameter.type)
        value += {"2": ".xy", "3": ""}[size[0]] if size else ".x"
    return f"{parameter.type}({value})"


def _argument(kernel: str, parameter: Parameter, value: object) -> str:
    """Returns an input as an argument, converted to the parameter's type.

    MLX declares numbers as references and arrays as pointers to const.
    """
    name = parameter.name
    if not (isinstance(value, mx.array) and value.ndim):
        return name if parameter.type.endswith("&") else f"&{name}"
    words = (_VECTOR.sub("", word) for word in re.findall(r"\w+", parameter.type))
    scalars = [_DTYPES[word] for word in words if word in _DTYPES]
    if scalars and value.dtype not in (*scalars, mx.uint8):
        raise ValueError(
            f"kernel {kernel}: parameter {name!r} is {parameter.type}, "
            f"expected an array of that type or of uint8, not {value.dtype}"
        )
    if parameter.type.endswith("&"):
        return f"*({parameter.type[:-1]}*){name}"
    return f"({parameter.type}){name}"


def chosen(kernels: Sequence[WholeKernel], name: str | None) -> WholeKernel | None:
    """Returns the kernel with a name, or None if the text is a body.

    Args:
        kernels: The kernels of a text.
        name: The name; may be None if there are fewer than two kernels.

    Raises:
        ValueError: If there is no kernel of that name.
    """
    if name is None and len(kernels) < 2:
        return kernels[0] if kernels else None
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    known = ", ".join(kernel.name for kernel in kernels) or "none: FILE is a body"
    raise ValueError(f"--kernel {name}, expected a kernel of FILE ({known})")


def whole_kernels(text: str) -> list[WholeKernel]:
    """Returns the kernel functions that a text defines; none for a body."""
    return list(_kernels(Tokens(text)))


def _kernels(tokens: Tokens) -> Iterator[WholeKernel]:
    for at in range(len(tokens)):
        if tokens.text(at) != "kernel" or tokens.directive(at) >= 0:
            continue
        begin, following = at, tokens.after(at)
        if tokens.text(tokens.before(at)) == "[":
            begin = tokens.before(tokens.before(at))
            following = tokens.after(tokens.closing(begin))
        name = tokens.after(following)
        opening = tokens.after(name)
        if tokens.text(following) != "void" or tokens.text(opening) != "(":
            continue
        closing = tokens.closing(opening)
        if tokens.text(tokens.after(closing)) != "{":
            continue
        yield WholeKernel(
            tokens.text(name),
            tuple(_template(tokens, begin)),
            tuple(_parameters(tokens, opening, closing)),
        )


def _template(tokens: Tokens, kernel: int) -> Iterator[str]:
    """Yields the names of the template parameters of a kernel."""
    angle = tokens.before(kernel)
    if tokens.text(angle) != ">":
        return
    head = angle
    while head >= 0 and tokens.text(head) != "template":
        head = tokens.before(head)
    for item in tokens.read_line(tokens.after(head) + 1, angle).split(","):
        yield item.partition("=")[0].split()[-1]


def _parameters(tokens: Tokens, opening: int, closing: int) -> Iterator[Parameter]:
    starts = [*tokens.items(opening, closing), closing + 1]
    for begin, end in itertools.pairwise(starts):
        text = tokens.read_line(begin, end - 1).rstrip(" ,")
        attribute = _ATTRIBUTE.search(text)
        words = re.match(r"(.*?)(\w+)$", _ATTRIBUTE.sub("", text).strip(), re.DOTALL)
        if words is None:
            raise ValueError(f"parameter {text!r} of a kernel has no name")
        yield Parameter(
            " ".join(words[1].split()), words[2], attribute["name"] if attribute else ""
        )
