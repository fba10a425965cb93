"""The guard: every kernel is checked on this machine before it serves its first call.

A GPU compiler may miscompile a kernel. Therefore the kernel variants of a plan run once
on small problems with known answers (`known_answers`), and the verdict is stored
(`checks`, `verdicts`).
Variants that do not compile, raise, end the process or give wrong results are not used:
another kernel or stock MLX serves the calls, one warning names the kernel, and
`why_not` returns the reason. What a kernel assumes about tensor operations is checked
before it (`backends.base.Probe`).

`MLX_MARLIN_GUARD=0` disables the guard. `1` also enables it in the emulator, where a
defective kernel raises otherwise.
"""

from mlx_marlin.guard.decisions import (
    ENVIRONMENT,
    condemn,
    fault_of,
    is_on,
    known_fault,
    remembered_fault,
    verdict_of,
    verdicts_so_far,
    why_not,
)

__all__ = [
    "ENVIRONMENT",
    "condemn",
    "fault_of",
    "is_on",
    "known_fault",
    "remembered_fault",
    "verdict_of",
    "verdicts_so_far",
    "why_not",
]
