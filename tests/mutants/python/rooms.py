"""Rooms whose Python is mutated, the tests that hold them, and the rates to reach."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutants.python.operators import Mutant

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
BUDGET = 30.0  # CPU seconds of tests that one mutant is given, quickest first
PATIENCE = 5.0, 3.0  # CPU seconds, and times the tests' own, until a mutant is endless


@dataclass(frozen=True)
class Room:
    """Files of one subject, and the tests that are run on their mutants."""

    patterns: tuple[str, ...]  # below the checkout
    tests: tuple[str, ...]
    rate: float  # of mutants that are noticed

    def files(self, root: Path) -> list[str]:
        """Returns the room's files, relative to the checkout.

        Importing a `__main__.py` would run its command.
        """
        found = {file for pattern in self.patterns for file in root.glob(pattern)}
        names = (str(x.relative_to(root)) for x in found if x.name != "__main__.py")
        return sorted(names)


def _room(rate: float, patterns: str, tests: str) -> Room:
    below = tuple(f"mlx_marlin/{pattern}" for pattern in patterns.split())
    return Room(below, tuple(f"tests/{test}" for test in tests.split()), rate)


@dataclass
class Called:
    """The CPU seconds of each test, and the tests that call each function or file."""

    digest: str  # of the room's files and tests
    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)

    def of(self, mutant: Mutant) -> list[str]:
        """Returns a mutant's tests, quickest first, as many as the budget allows.

        A file of which nothing is called has data, which its neighbours use.
        """
        found = self.tests.get(mutant.place) or self.tests.get(mutant.file)
        if found is None:
            folder = f"{Path(mutant.file).parent}/"
            near = [tests for key, tests in self.tests.items() if folder in key]
            found = [*dict.fromkeys(test for tests in near for test in tests)]
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found, key=self.seconds.__getitem__):
            total += self.seconds[test]
            if chosen and total > BUDGET:
                break
            chosen.append(test)
        return chosen

    def limit(self, tests: Sequence[str]) -> float:
        """Returns the CPU seconds after which a run of tests counts as endless."""
        return PATIENCE[0] + PATIENCE[1] * sum(self.seconds[test] for test in tests)


ROOMS = {
    "lm/race": _room(
        0.95,
        "lm/race/*.py lm/measured_models.py",
        "race tuning integrations/test_optimize.py cli/test_tune_settings.py",
    ),
    "lm/drafts": _room(0.95, "lm/drafts/*.py", "drafts"),
    "serving": _room(
        0.95,
        "products/serving.py products/dispatch.py",
        "products/test_dispatch.py products/test_gather_eligibility.py "
        "products/test_keys_of_memories.py products/test_linear.py "
        "products/test_decision_log.py products/test_gradients.py "
        "products/test_packed_experts.py products/test_batched_calls.py "
        "products/test_wrong_calls.py planning/test_who_serves.py",
    ),
    "results": _room(
        0.95,
        "backends/planner.py backends/measured_results.py backends/result_files.py",
        "planning/test_who_serves.py planning/test_choice.py cuda/test_handover.py "
        "tuning/test_measured_results.py tuning/test_results_used.py "
        "tuning/test_damaged_results.py race/test_what_is_kept.py",
    ),
    "guard": _room(0.95, "guard/*.py", "guard"),
    "planning": _room(
        0.95,
        "planning/**/*.py",
        "planning tuning/test_measurement.py tuning/test_measured_results.py "
        "cli/test_plan.py metal/test_expert_plans.py "
        "products/test_dequantizing.py cuda/test_rotation_plans.py",
    ),
    "lm/optimize": _room(
        0.95,
        "lm/recipe.py lm/optimize.py lm/layer_conversion.py",
        "integrations/test_optimize.py integrations/test_optimize_failures.py "
        "integrations/test_dry_run.py integrations/test_float16.py "
        "integrations/test_warm_up.py integrations/test_invariant_model.py "
        "race/test_recipes.py race/test_measured_models.py race/test_what_is_kept.py "
        "layers/test_layer_structure.py layers/test_joined.py "
        "layers/test_expert_layers.py layers/test_multi_linear.py",
    ),
    "checkpoints": _room(0.9, "checkpoints/**/*.py lm/checkpoints/*.py", "checkpoints"),
    "layers": _room(0.9, "layers/*.py", "layers"),
    "measure": _room(
        0.9,
        "measure/**/*.py",
        "tuning/test_operands.py tuning/test_timing.py "
        "tuning/test_tuner.py tuning/test_profiling.py benchmarking/test_mac.py "
        "benchmarking/test_products.py benchmarking/test_result_file.py",
    ),
    "metal_emulator": Room(("metal_emulator/**/*.py",), ("tests/metal_emulator",), 0.9),
    "cli": _room(0.75, "cli/**/*.py", "cli tuning/test_profiling.py"),
    "lm/report": _room(
        0.75,
        "lm/report/*.py lm/verification/*.py",
        "verification cli/test_report.py cli/test_verify.py "
        "integrations/test_report.py integrations/test_dry_run.py",
    ),
}


def equivalents() -> dict[str, str]:
    """Returns the reason for each mutant that no test can tell from the code."""
    rows = (line.split(" | ") for line in EQUIVALENT.read_text().splitlines())
    return {" | ".join(row[:-1]): row[-1] for row in rows if len(row) > 1}


def row(mutant: Mutant) -> str:
    """Returns how a mutant is written in the file of equivalent ones."""
    texts = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return " | ".join((mutant.file, mutant.function, *texts))
