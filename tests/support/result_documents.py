"""Documents as `mlx-marlin bench` and `make mac` write them, with made-up times."""

from typing import Any

ARMS = {
    ("ours", "mlx"): 1.0,
    ("ours", "marlin"): 0.9,
    ("mx.quantized_matmul", "mlx"): 1.7,
    ("dequantize + matmul", "mlx"): 4.0,
}
"""Arm and layout -> its time in comparison with the first."""
SHAPES = ((4096, 4096), (14336, 4096))


def timing(milliseconds: float, method: str = "wall time") -> dict[str, Any]:
    """Returns the fields of a time."""
    return {
        "milliseconds": round(milliseconds, 4),
        "range_ms": round(milliseconds / 40, 4),
        "samples": 7,
        "drift": 0.004,
        "source": "measured" if method == "wall time" else "predicted",
        "method": method,
    }


def product(
    m: int, n: int, k: int, arm: str, layout: str, clock: str, time: dict[str, Any]
) -> dict[str, Any]:
    """Returns a row of a product."""
    problem = {"m": m, "n": n, "k": k, "mode": "affine", "bits": 4, "group_size": 64}
    return {
        "problem": {**problem, "dtype": "float16", "layout": layout},
        "arm": arm,
        "clock": clock,
        **time,
        "handover": "predicted 1.0 times stock's speed" if m > 64 else None,
        "plan": None,
    }


def result(method: str = "wall time", most: int = 512) -> dict[str, Any]:
    """Returns a whole document.

    Args:
        method: How its times were found.
        most: Rows of the largest product.
    """
    rows = [m for m in (1, 2, 4, 8, 12, 16, 32, 64, 512) if m <= most]
    both = [timing(20.5, method), timing(31.25, method)]
    return {
        "schema": "mlx-marlin result",
        "version": 1,
        "date": "2026-11-24",
        "source": timing(1, method)["source"],
        "machine": {
            "chip": "Apple M3 Max",
            "architecture": "applegpu_g15s",
            "cores": 40,
            "memory_gb": 64,
            "system": "Darwin 26.1",
            "build": "25B78",
            "backend": "metal",
            "python": "3.12.1",
            "mlx": "0.32.4",
            "mlx_lm": "0.32.2",
            "mlx_marlin": "0.1.0",
            "commit": "abc1234",
            "kernels": "0123456789abcdef",
        },
        "stages": [
            {"name": "doctor", "status": "passed", "host_seconds": 41.2, "detail": ""},
            {
                "name": "tests",
                "status": "failed",
                "host_seconds": 96.0,
                "detail": "411 passed, 1 failed, 0 errors, 2 skipped: test_a_name",
            },
        ],
        "products": [
            product(
                *(m, n, k, arm, layout, clock),
                timing(n * k / 1e9 * factor * (5 + -(-m // 8)) * clock_factor, method),
            )
            for n, k in SHAPES
            for m in rows
            for (arm, layout), factor in ARMS.items()
            for clock, clock_factor in (("chain", 1.0), ("independent", 0.8))
        ],
        "generation": [
            {
                "model": "Qwen3-4B-4bit",
                "arm": arm,
                "streams": streams,
                "prompt_tokens": 128,
                "new_tokens": 64,
                "prompt": both[0],
                "step": both[1],
                "prompt_tokens_per_second": 128 * streams / 0.0205,
                "generated_tokens_per_second": streams / 0.03125,
            }
            for streams in (1, 2, 4)
            for arm in ("stock MLX", "ours")
        ],
        "first_tokens": [
            {
                "model": "Qwen3-4B-4bit",
                "arm": "ours",
                "prompt_tokens": 128,
                "cold": timing(1500, method),
                "warm": timing(250, method),
            }
        ],
        "notes": ["the clock of the GPU fell by 3 % during the run"],
    }
