"""Prints how a product would be computed on a chip, and who serves it.

Run it from the repository's root, on any machine:

    python examples/explain_a_plan/run.py
"""

import textwrap

import mlx_marlin
from mlx_marlin.backends import planner

CHIP = "Apple M3 Max"
N = K = 4096

choice = mlx_marlin.plan(8, N, K, chip=CHIP)
print("8 rows:")
print(textwrap.fill(choice.explain(), 100))

print(f"\nThe first 5 of {len(choice.candidates)} candidates (predicted times):")
print("\n".join(choice.table().splitlines()[:6]))

print("\nThe best plan with a given part:")
for name, part in {
    "strategy='data_parallel'": {"strategy": "data_parallel"},
    "strategy='split_k'": {"strategy": "split_k"},
    "simdgroups_k=2": {"simdgroups_k": 2},
    "kernel='gemm_staged'": {"kernel": "gemm_staged"},
}.items():
    other = planner.compare(choice.plan.problem, device=choice.device, **part)
    slower = other.prediction.seconds / choice.prediction.seconds - 1
    threadgroups = other.plan.work.threadgroups
    print(f"  {name:<26}{threadgroups:>4} threadgroups, predicted {slower:+.1%}")

print(
    "\nWho serves how many rows where nobody has measured (our predicted microseconds):"
)
for rows in (1, 2, 4, 8, 16, 32, 64):
    choice = mlx_marlin.plan(rows, N, K, chip=CHIP)
    served = "stock MLX" if choice.reason else "our kernels"
    print(f"{rows:>4}  ours {1e6 * choice.prediction.seconds:5.1f}  {served}")

print("\nWhy one row goes to stock MLX:")
print(textwrap.fill(str(mlx_marlin.plan(1, N, K, chip=CHIP).reason), 100))
