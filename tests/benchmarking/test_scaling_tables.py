"""The tables of docs/scaling.md are the cost model's, and what they assume holds."""

import re
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.scaling import (
    LLAMA_8B,
    MEMORY,
    RDMA,
    SHARDED,
    TCP,
    Link,
    sharded_seconds,
)
from mlx_marlin.backends.metal.device import Device, chips
from mlx_marlin.planning.problem import problem_of

M4_MAX = Device.named("Apple M4 Max")
FREE = Link(latency_us=0, gigabytes=1e9, is_ring=False, crossings_us=0)


def test_the_document_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    # After an intended change: python -m benchmarks.scaling
    assert scaling.main(["--check"]) == 0
    assert capsys.readouterr().out == "up to date\n"


def test_every_chip_has_a_memory_and_a_line() -> None:
    names = {device.name.removeprefix("Apple ") for device in scaling.devices()}

    assert {*MEMORY} == names
    assert len(names) == len(chips())
    lines = scaling.streams_table().splitlines()
    assert {re.match(r"\| (M[^|]*) \|", line)[1] for line in lines[2:]} == names


def test_one_stream_never_exceeds_the_bandwidth() -> None:
    for line in scaling.streams_table().splitlines()[2:]:
        _, bandwidth, _, name, one, *_ = (cell.strip() for cell in line.split("|")[1:])
        model = next(each for each in scaling.SIZES if each.name == name)
        if model.experts is None:
            assert float(one) * scaling.gigabytes(model) < float(bandwidth) * 1.02


def test_the_document_says_what_8_and_32_streams_of_a_dense_model_give() -> None:
    """If a number here changes, so do the sentences before the experts."""
    slow, others, fewer = [], [], []
    for line in scaling.streams_table().splitlines()[2:]:
        chip, _, _, name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        if next(each for each in scaling.SIZES if each.name == name).experts:
            continue
        one, _, _, eight, sixteen, many, _ = map(float, cells)
        group = slow if re.fullmatch("M1 (Pro|Max|Ultra)", chip) else others
        group.append(8 * one / eight)
        if not chip.startswith("M5"):
            fewer.append(1 - many / sixteen)

    assert (round(max(others), 2), round(max(slow), 2)) == (1.23, 1.44)
    assert sum(share > 0 for share in fewer) > 0.8 * len(fewer)
    assert round(100 * max(fewer)) == 18
    text = " ".join(scaling.DOCUMENT.read_text(encoding="utf-8").split())
    assert "takes at most 1.23 times as long as one" in text
    assert "except on M1 Pro, M1 Max and M1 Ultra (up to 1.44)" in text
    assert "fewer tokens a second than 16, by up to 18 %" in text


def test_sizes_of_formats_are_those_of_products() -> None:
    for name, mode in (("4 bits", "affine"), ("mxfp4", "mxfp4")):
        problem = problem_of(1, 4096, 4096, mode=mode)
        bits = 8 * problem.weight_bytes / 4096**2
        assert scaling.FORMATS[name] == bits


def test_the_documents_link_parameters_are_the_scripts() -> None:
    text = scaling.DOCUMENT.read_text(encoding="utf-8")
    for link, name in ((RDMA, "RDMA (JACCL)"), (TCP, "TCP (ring)")):
        cells = f"| {link.latency_us:g} us | {link.gigabytes:g} GB/s |"
        assert f"| Thunderbolt 5, {name} {cells}" in text
    sums = 2 * 32
    for link, shown in ((RDMA, "2.5 ms with RDMA"), (TCP, "40 ms with TCP")):
        took = sums * link.sum_seconds(2, 4096 * 2) * 1e3
        assert f"{took:.2g} ms" == " ".join(shown.split()[:2])
        assert shown in text


@given(
    machines=st.integers(2, 8),
    size=st.integers(1, 10**9),
    latency=st.floats(0, 1000),
    bandwidth=st.floats(0.1, 100),
)
def test_a_ring_of_two_needs_two_messages_of_half_the_bytes(
    machines: int, size: int, latency: float, bandwidth: float
) -> None:
    ring = Link(latency, bandwidth, is_ring=True)
    mesh = Link(latency, bandwidth, is_ring=False)

    crossing = mesh.crossings_us * 1e-6
    of_mesh = mesh.sum_seconds(2, size) - crossing
    assert of_mesh == pytest.approx(latency * 1e-6 + size / bandwidth / 1e9)
    of_ring = ring.sum_seconds(2, size) - crossing
    assert of_ring == pytest.approx(2 * latency * 1e-6 + size / bandwidth / 1e9)
    assert ring.sum_seconds(machines, size) >= mesh.sum_seconds(2, size) - 1e-12


def test_machines_with_free_sums_are_faster_but_not_more_than_so_many_times() -> None:
    for model in SHARDED:
        one = scaling.totals(model, 1, M4_MAX)[1]
        for machines in (2, 4):
            several = sharded_seconds(model, 1, M4_MAX, machines, FREE)
            assert one / machines < several < one


def test_uneven_parts_are_refused_as_mlx_refuses_them() -> None:
    with pytest.raises(ValueError, match="size=4096 has no 3 equal parts"):
        sharded_seconds(LLAMA_8B, 1, M4_MAX, 3, RDMA)


def test_llama_shards_the_products_that_the_table_assumes() -> None:
    """mlx-lm's `shard` names q, k, v, gate and up as rows, o and down as columns."""
    with open(import_module("mlx_lm.models.llama").__file__) as file:
        source = file.read()
    found = re.findall(
        r'\.(\w+)_proj = shard_linear\(\s*layer\.\w+\.\w+, "([\w-]+)"', source
    )

    columns = {name for name, how in found if how == "sharded-to-all"}
    assert columns == {"o", "down"}
    assert {name for name, _ in found} - columns == {"q", "k", "v", "gate", "up"}
    assert "lm_head = shard" not in source
