"""The counts of MLX's and mlx-dspark's kernels in the table of rivals."""

import pytest

from benchmarks import rivals

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("rows", ["1", "3", "8", "24"])
def test_few_columns_multiplied_are_all_columns(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--exact` fails otherwise: qmv_fast, qmv_wide, qmm_t in parts, skinny_qmm."""
    shapes = ("--shapes", "1024x512", "--no-slots", "--exact", "--rows", rows)
    assert rivals.main(shapes) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") + 1 :]
    assert len(table) == 2 + len(rivals.BITS) * len(rivals.DTYPES)
