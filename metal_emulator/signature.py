"""The signatures of whole kernels, and calls that fit them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_emulator.bound_call import ATTRIBUTES, BoundCall, instance
from metal_emulator.language.entries import Entry

_ARGUMENT = re.compile(r"[\w:<>*&(), .-]+")


@dataclass(frozen=True)
class Signature:
    """The parameters of an entry."""

    entry: Entry  # The entry
    inputs: tuple[str, ...]  # Names of the memory parameters that are read, in order
    outputs: tuple[str, ...]  # Names of the others, in order

    @classmethod
    def of(cls, entry: Entry, outputs: Sequence[str] | None) -> Signature:
        """Checks the parameters of an entry; `outputs` None: all written."""
        for each in entry.parameters:
            known = each.is_memory or each.attribute in {*ATTRIBUTES, "threadgroup"}
            if not each.name or not known:
                raise ValueError(
                    f"kernel {entry.name}: parameter {str(each)!r}, expected a buffer, "
                    "threadgroup memory or an attribute of threads"
                )
        _check_indices(entry)
        memory = [each for each in entry.parameters if each.is_memory]
        written = [each.name for each in memory if each.is_written]
        chosen = written if outputs is None else list(outputs)
        for name in chosen:
            _check_known(
                entry,
                "output",
                name,
                written,
                "a parameter in device memory, not const",
            )
        inputs = tuple(each.name for each in memory if each.name not in chosen)
        return cls(entry, inputs, tuple(name for name in written if name in chosen))

    @property
    def threadgroup_memory(self) -> tuple[str, ...]:
        """Names of the pointers to threadgroup memory, in order.

        What references refer to is as large as its type.
        """
        return tuple(
            each.name
            for each in self.entry.parameters
            if each.attribute == "threadgroup" and not each.type.endswith("&")
        )

    def bind(
        self,
        inputs: Sequence[Any] | Mapping[str, Any],
        template: Mapping[str, Any],
        threadgroup_memory: Mapping[str, int],
    ) -> BoundCall:
        """Returns a call with values for the inputs, in order or by name."""
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(self.inputs):
                raise ValueError(
                    f"kernel {self.entry.name}: {len(inputs)} inputs, expected "
                    f"{len(self.inputs)} ({', '.join(self.inputs)})"
                )
            inputs = dict(zip(self.inputs, inputs, strict=True))
        self._check(inputs, self.inputs, "an input or output", self.outputs)
        self._check(threadgroup_memory, self.threadgroup_memory, "threadgroup memory")
        return BoundCall(
            entry=self.entry,
            inputs=self.inputs,
            outputs=self.outputs,
            values=dict(inputs),
            template=self._template(template),
            threadgroup_memory=dict(threadgroup_memory),
        )

    def instance(self, template: Mapping[str, Any]) -> str:
        """Returns the instance of a template with these arguments, as Metal text."""
        return instance(self.entry, self._template(template))

    def _check(
        self,
        given: Mapping[str, Any],
        wanted: Sequence[str],
        kind: str,
        optional: Sequence[str] = (),
    ) -> None:
        for name in wanted:
            if name not in given:
                raise ValueError(
                    f"kernel {self.entry.name}: parameter {name!r} needs {kind} of its "
                    "name"
                )
        for name in given:
            _check_known(self.entry, kind, name, [*wanted, *optional], "a parameter")

    def _template(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Returns the template arguments as text, by parameter."""
        wanted = self.entry.template
        for name in given:
            _check_known(self.entry, "template argument", name, wanted, "a parameter")
        # Parameters behind the last argument have defaults, or clang says what lacks.
        names = [name for name in wanted if name in given]
        for name in wanted[: len(names)]:
            if name not in given:
                raise ValueError(
                    f"kernel {self.entry.name}: template parameter {name!r} has no "
                    "value"
                )
        return {name: metal_text(given[name]) for name in names}


def _check_indices(entry: Entry) -> None:
    """Raises ValueError if two parameters have one index, which Metal refuses."""
    first: dict[tuple[str, str], str] = {}
    for each in entry.parameters:
        place = (each.attribute, each.index)
        if each.index and first.setdefault(place, each.name) != each.name:
            raise ValueError(
                f"kernel {entry.name}: parameters {first[place]!r} and {each.name!r} "
                f"are both [[{each.attribute}({each.index})]], expected another index"
            )


def _check_known(
    entry: Entry, kind: str, name: str, known: Iterable[str], expected: str
) -> None:
    if name not in known:
        raise ValueError(
            f"kernel {entry.name}: {kind} {name!r}, expected {expected} "
            f"({', '.join(known) or 'it has none'})"
        )


def metal_text(value: object) -> str:
    """Returns a template argument as Metal text."""
    if isinstance(value, mx.Dtype):
        name = str(value).removeprefix("mlx.core.")
        return name if name == "bool" else {"float32": "float"}.get(name, f"{name}_t")
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, str) and _ARGUMENT.fullmatch(value):
        return value
    raise ValueError(
        f"template argument {value!r:.60}, expected a dtype, a number or Metal text"
    )
