"""What unpacked weights need in a trace of `mx.compile(f, shapeless=True)`.

MLX has no rule for the shapes of some operations there, such as views and slices.
"""

from io import StringIO

import mlx.core as mx


def is_traced() -> bool:
    """Returns whether this thread traces a function without shapes.

    MLX has no function for the question. There alone it adds an operation for a
    broadcast of equal shapes (0.32.4).
    """
    text = StringIO()
    array = mx.array([0.0])
    mx.export_to_dot(text, mx.broadcast_arrays(array, array)[0])
    return "label" in text.getvalue()


def settled(*arrays: mx.array) -> tuple[mx.array, ...]:
    """Returns arrays that were made from weights, evaluated in such a trace.

    The trace then holds them as constants, for as long as the compiled function lives.
    """
    if is_traced():
        try:
            mx.eval(arrays)
        except ValueError as error:
            raise ValueError(
                "packed weights that stock MLX serves cannot be inputs of a function "
                "that is compiled with shapeless=True: leave them out of `inputs`, or "
                "call mlx_marlin.optimize(model, layout='mlx')"
            ) from error
    return arrays
