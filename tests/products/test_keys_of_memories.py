"""Calls that differ in one thing are never served by each other's decision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import PackedWeight, pack, state
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products import experts, linear, matmul, request
from mlx_marlin.products.dispatch import PreparedCall

Change = dict[str, Any]
K, N, EXPERTS = 128, 64, 3


@dataclass(frozen=True)
class Call:
    """Everything that calls may differ in.

    Among it is what makes a call wrong: words of another dtype, too few rows of one
    array, and a group size that is not that of the scales.
    """

    x: tuple[int, ...] = (2,)
    dtype: mx.Dtype = mx.float32
    on_cpu: bool = True
    n: int = N
    k: int = K
    batch: tuple[int, ...] = ()
    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    stated_group_size: int | None = None
    words: mx.Dtype = mx.uint32
    too_short: str = ""
    scales: mx.Dtype = mx.float16
    biases: mx.Dtype | None = mx.float16
    global_scale: mx.array | None = None
    transpose: bool = True
    invariant: bool = False
    norm: float | None = None
    bias: bool = False
    activation: str | None = None
    multiply: bool = False
    residual: bool = False
    parts: tuple[int, ...] = (16, 48)
    gate: str = "silu"
    rows_of_pairs: mx.Dtype | None = None
    pairs: tuple[int, ...] = (2,)
    index: mx.Dtype = mx.uint32
    ascend: bool = False

    @property
    def rows(self) -> mx.array:
        return mx.zeros((*self.x, self.k if self.transpose else self.n), self.dtype)

    @property
    def format(self) -> Change:
        size = self.stated_group_size or self.group_size
        return {"group_size": size, "bits": self.bits, "mode": self.mode}

    @property
    def native(self) -> list[mx.array]:
        """Codes, scales and, if the mode has them, biases."""
        codes, groups = self.k * self.bits // 32, self.k // self.group_size
        kinds = {
            "words": (codes, self.words),
            "scales": (groups, self.scales),
            "biases": (groups, self.biases),
        }
        rows = {name: 8 if name == self.too_short else self.n for name in kinds}
        return [
            mx.zeros((*self.batch, rows[name], columns), dtype)
            for name, (columns, dtype) in kinds.items()
            if dtype is not None
        ]

    @property
    def packed(self) -> PackedWeight:
        return pack(*self.native, **self.format, global_scale=self.global_scale)

    @property
    def finish(self) -> dict[str, mx.array | None]:
        """A bias, factors and summands, those that the call has."""
        shape = (*self.x, self.n)
        shapes = {"bias": shape[-1:], "multiply": shape, "residual": shape}
        return {
            name: mx.zeros(own, self.dtype) if getattr(self, name) else None
            for name, own in shapes.items()
        }

    def epilogue(self, *, parts: bool = False) -> Epilogue:
        finish = {name: array is not None for name, array in self.finish.items()}
        own = self.parts if parts else ()
        return Epilogue(**finish, activation=self.activation or "none", parts=own)

    @property
    def biases_of_experts(self) -> list[mx.array]:
        return [mx.zeros((EXPERTS, self.n), self.dtype)] * 2 * self.bias


def of_public(weight: Callable[[Call], tuple[Any, ...]]) -> dict[str, Any]:
    """Returns the public functions, for weights in a layout."""

    def options(call: Call) -> Change:
        return {} if isinstance(weight(call)[0], PackedWeight) else call.format

    return {
        "quantized_matmul": lambda call: mlx_marlin.quantized_matmul(
            call.rows, *weight(call), transpose=call.transpose, **options(call)
        ),
        "linear": lambda call: mlx_marlin.linear(
            call.rows,
            *weight(call),
            **call.finish,
            activation=call.activation,
            invariant=call.invariant,
            **options(call),
        ),
        "linears": lambda call: mlx_marlin.linears(
            call.rows,
            *weight(call),
            parts=call.parts,
            bias=call.finish["bias"],
            invariant=call.invariant,
            **options(call),
        ),
    }


NATIVE = of_public(lambda call: (*call.native,))
PACKED = of_public(lambda call: (call.packed,))
LAYERS: dict[str, Callable[[Call], Any]] = {
    "layer_product": lambda call: linear.layer_product(
        call.rows,
        call.packed,
        call.finish["bias"],
        call.finish["residual"],
        invariant=call.invariant,
        transpose=call.transpose,
    ),
    "layer_parts": lambda call: linear.layer_parts(
        call.rows,
        call.packed,
        call.parts,
        call.finish["bias"],
        invariant=call.invariant,
    ),
    "packed_linear": lambda call: linear.fused_linear(
        call.rows, call.packed, call.epilogue(parts=True), (), call.norm
    ),
    "native_linear": lambda call: linear.fused_linear(
        call.rows,
        (*[*call.native, None][:3], (*call.format.values(),)),
        call.epilogue(parts=True),
        (),
        call.norm,
    ),
    "gather_packed": lambda call: experts.gather_packed(
        mx.expand_dims(call.rows, -2),
        call.packed,
        call.rows_of_pairs and mx.zeros(call.pairs, call.rows_of_pairs),
        mx.zeros(call.pairs, call.index),
        transpose=call.transpose,
        sorted_indices=call.ascend,
        invariant=call.invariant,
        bias=next(iter(call.biases_of_experts), None),
    ),
    "gather_native": lambda call: experts.gather_native(
        mx.expand_dims(call.rows, -2),
        (*[*call.native, None][:3], (*call.format.values(),)),
        call.rows_of_pairs and mx.zeros(call.pairs, call.rows_of_pairs),
        mx.zeros(call.pairs, call.index),
        transpose=call.transpose,
        global_scale=call.global_scale,
        sorted_indices=call.ascend,
        invariant=call.invariant,
    ),
    "gather_gated": lambda call: experts.gather_gated(
        call.rows,
        call.packed,
        call.packed,
        mx.zeros((*call.x, *call.pairs), call.index),
        call.gate,
        (*call.biases_of_experts,),
    ),
}
BFLOAT: Change = {"scales": mx.bfloat16, "biases": mx.bfloat16}
OF_ALL: list[Change] = [
    *({"x": (3,)}, {"x": (1, 2)}, {"dtype": mx.bfloat16}, {"on_cpu": False}, BFLOAT),
    *({"group_size": 32}, {"bits": 8}, {"n": 2 * N, "parts": (16, 112)}, {"k": 2 * K}),
]
OF_NATIVE: list[Change] = [
    *(*OF_ALL, {"biases": mx.bfloat16}, {"scales": mx.bfloat16}),
    *({"words": mx.int32}, {"stated_group_size": 32}),
    *({"too_short": name} for name in ("words", "scales", "biases")),
]
OF_PACKED: list[Change] = [*OF_ALL, {"mode": "zero_point"}]
SQUARE: Change = {"n": K, "k": K, "transpose": False}
OF_LINEAR: list[Change] = [
    *({"bias": True}, {"residual": True}, {"multiply": True}, {"invariant": True}),
    {"activation": "silu"},
]
OF_PARTS: list[Change] = [{"bias": True}, {"parts": (48, 16)}, {"norm": 1e-5}]
OF_PARTS += [{"invariant": True}]
OF_EXPERTS: list[Change] = [
    *({"x": (1,)}, {"dtype": mx.float16}, *OF_PACKED[3:], {"bias": True}),
    {"index": mx.float32},
]
GLOBAL: Change = {"global_scale": mx.array(2.0)}
PLAIN, SEVERAL = Call(), Call(batch=(EXPERTS,))
NVFP4 = Call(
    dtype=mx.float16, mode="nvfp4", group_size=16, scales=mx.uint8, biases=None
)
CASES: list[tuple[str, Callable[[Call], Any], Call, list[Change]]] = [
    ("native", NATIVE["quantized_matmul"], PLAIN, OF_NATIVE),
    ("native", NATIVE["quantized_matmul"], replace(PLAIN, n=K), [SQUARE]),
    ("native", NATIVE["linear"], PLAIN, OF_LINEAR),
    ("native", NATIVE["linears"], PLAIN, [*OF_PARTS[:2], OF_PARTS[3]]),
    ("packed", PACKED["quantized_matmul"], PLAIN, OF_PACKED),
    ("packed", PACKED["quantized_matmul"], replace(PLAIN, n=K), [SQUARE]),
    ("packed", PACKED["quantized_matmul"], replace(PLAIN, x=(1, 2)), [{"batch": (1,)}]),
    ("packed", PACKED["linear"], PLAIN, OF_LINEAR),
    ("packed", PACKED["linears"], PLAIN, [*OF_PARTS[:2], OF_PARTS[3]]),
    ("layer", LAYERS["layer_product"], PLAIN, [*OF_PACKED, *OF_LINEAR[:2]]),
    ("layer", LAYERS["layer_product"], PLAIN, [OF_LINEAR[3]]),
    ("layer", LAYERS["layer_product"], replace(PLAIN, n=K), [SQUARE]),
    ("joined", LAYERS["layer_parts"], PLAIN, [*OF_PACKED, *OF_PARTS[:2], OF_PARTS[3]]),
    ("traced", LAYERS["packed_linear"], PLAIN, [*OF_PACKED, *OF_PARTS[:3]]),
    ("traced native", LAYERS["native_linear"], PLAIN, [*OF_NATIVE, *OF_PARTS[:3]]),
    (
        "experts",
        LAYERS["gather_packed"],
        SEVERAL,
        [
            *OF_EXPERTS,
            *({"pairs": (4, 2)}, {"ascend": True}, {"invariant": True}),
            *({"rows_of_pairs": mx.uint32}, {"rows_of_pairs": mx.float32}),
        ],
    ),
    ("experts", LAYERS["gather_packed"], replace(SEVERAL, n=K), [SQUARE]),
    (
        *("experts", LAYERS["gather_native"], SEVERAL),
        [
            *(*OF_ALL, {"x": (1,)}, {"batch": (EXPERTS + 1,)}, {"pairs": (4, 2)}),
            *({"ascend": True}, {"invariant": True}, {"rows_of_pairs": mx.uint32}),
            {"stated_group_size": 32},
        ],
    ),
    ("experts", LAYERS["gather_native"], replace(SEVERAL, n=K), [SQUARE]),
    (
        *("experts", LAYERS["gather_native"], replace(NVFP4, batch=(EXPERTS,))),
        [
            {"global_scale": mx.array([2.0] * EXPERTS)},
            *({"stated_group_size": 32}, {"mode": "mxfp4"}),
        ],
    ),
    (
        *("experts", LAYERS["gather_packed"]),
        replace(SEVERAL, rows_of_pairs=mx.uint32),
        [{"rows_of_pairs": mx.float32}],
    ),
    (
        *("gated", LAYERS["gather_gated"], SEVERAL),
        [*OF_EXPERTS, {"pairs": (4,)}, {"gate": "swiglu_oai"}],
    ),
    *(
        (f"{name} with a scale", function, NVFP4, [GLOBAL])
        for name, function in {**PACKED, **LAYERS}.items()
        if name != "native_linear" and not name.startswith("gather")
    ),
]
MODULES = (matmul, experts, request)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Call], Any]:
    """Returns what makes a call: it returns the request that decided, or the error."""

    def decided(*decided_for: object) -> PreparedCall:
        return PreparedCall(lambda *_: decided_for)  # type: ignore[arg-type,return-value]

    for module in (matmul, experts):
        monkeypatch.setattr(module, "prepare", decided)

    def asked(function: Callable[[Call], Any], call: Call) -> Any:
        device = mx.Device(mx.cpu if call.on_cpu else mx.gpu)
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "CPU", device)
            try:
                return function(call)
            except ValueError as error:
                return str(error)

    state.reset()
    return asked


@pytest.mark.parametrize(
    ("function", "base", "change"),
    [
        pytest.param(function, base, change, id=f"{name} {', '.join(change)}")
        for name, function, base, changes in CASES
        for change in changes
    ],
)
def test_a_call_that_differs_is_decided_by_itself(
    function: Callable[[Call], Any],
    base: Call,
    change: Change,
    ask: Callable[[Any, Call], Any],
) -> None:
    first = ask(function, base)

    second = ask(function, replace(base, **change))

    assert first != second
    assert ask(function, base) == first
    state.reset()
    assert ask(function, replace(base, **change)) == second
