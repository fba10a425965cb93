"""Which kernels are compiled again when a header of the emulator changes."""

from pathlib import Path

import pytest

from metal_emulator.compiling import build


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An emulator of two headers, in a folder whose path has the word `tensor`."""
    folder = tmp_path / "tensor" / "emulator"
    for name in ("include/kernel.h", "include/tensor/matmul2d.h"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(build, "HERE", folder)
    return folder


@pytest.mark.parametrize(
    ("header", "plain_changes"),
    [("include/kernel.h", True), ("include/tensor/matmul2d.h", False)],
)
def test_headers_of_tensors_concern_kernels_that_include_them(
    package: Path, header: str, plain_changes: bool
) -> None:
    digest = build._shim_digest.__wrapped__
    before = digest(False), digest(True)
    (package / header).write_text("changed")
    after = digest(False), digest(True)
    assert (after[0] != before[0]) == plain_changes
    assert after[1] != before[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#include <metal_tensor>\n", True),
        (
            "  # include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n",
            True,
        ),
        ("#include <metal_stdlib>\n// #include <metal_tensor>\n", False),
    ],
)
def test_a_kernel_with_tensors_includes_their_headers(
    text: str, expected: bool
) -> None:
    assert build.uses_tensors(text) == expected
