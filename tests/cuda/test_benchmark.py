"""The benchmarks of a CUDA device run anywhere, and judge what they time."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.lm import generation
from support.choose import Choose
from support.profiles import sampled

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
COMPARED = ("ours", "stock", "matmul")
FACTS = {"date", "command", "device", "driver", "backend", "mlx", "commit", "complete"}


with pytest.MonkeyPatch.context() as patch:  # they import each other as scripts do
    patch.syspath_prepend(str(BENCHMARKS))
    import cuda_compiling as compiling
    import cuda_generation as generation
    import cuda_instances as instances
    import cuda_products as products
    import cuda_report
    import cuda_summary as summary
    import cuda_timing
    import cuda_weights as weights

    import cuda


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets other processes find the benchmarks too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(script: str, path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Runs a benchmark with stock MLX's products, which need no compiling."""
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", *options]
    done = subprocess.run(
        [*command, "--json", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MLX_MARLIN_BACKEND": "stock", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_products_are_checked_timed_and_told(tmp_path: Path) -> None:
    formats = ("affine4g128:bfloat16", "symmetric8g64")
    text, report = run("cuda.py", tmp_path / "out.json", "--formats", *formats)

    assert report.keys() >= FACTS
    assert report["complete"]
    assert report["bandwidth_gb_s"] > 0
    assert len(report["results"]) == 2 * 2 * 2
    for each in report["results"]:
        assert each["wrong"] is None
        assert each["error"] <= each["limit"]
        assert "stock" in each["served_by_stock"]
        names = [f"{name}{way}" for name in COMPARED for way in ("", "_stream")]
        for name in ("ours_traced", "stock_traced"):
            names += [name, f"{name}_stream"]
        assert min(each[f"{name}_us"] for name in ("floor", *names)) > 0
        assert 0 < each["ours_build_us"] < each["ours_us"]
    assert "256→96, symmetric8g64:float16, layout marlin" in text
    assert "8 products, 0 wrong" in text
    assert report["seconds"].keys() >= {"compiling", "drawing", "checking", "timing"}


@pytest.mark.parametrize(
    ("limit", "seconds", "count"),
    # 10 for the first product, and 20 are allowed; none is.
    [("20", [0.0, 10.0, 12.0], 1), ("0", [1.0], 0)],
)
def test_a_time_limit_may_end_within_a_shape_and_leaves_a_report(
    limit: str,
    seconds: list[float],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    passed = iter(seconds)
    monkeypatch.setattr(cuda_report.Laps, "total", lambda _: next(passed, 21.0))
    path = tmp_path / "out.json"
    options = ["--smoke", "--rows", "1", "2", "3", "--time-limit", limit]
    monkeypatch.setattr(sys, "argv", ["cuda.py", *options, "--json", str(path)])

    assert cuda.main() == 0
    said = capsys.readouterr().out
    if count:
        assert "1 products, 0 wrong" in said
    assert "NOT COMPLETE" in said
    report = json.loads(path.read_text())
    assert report.keys() >= FACTS
    assert not report["complete"]
    assert len(report["results"]) == count


@pytest.mark.slow
@pytest.mark.usefixtures("unfused")
def test_streams_are_generated_and_told(tmp_path: Path) -> None:
    text, report = run("cuda_generation.py", tmp_path / "out.json", "--layers", "1")

    assert report.keys() >= FACTS
    assert report["complete"]
    assert [each["streams"] for each in report["results"]] == [1, 3]
    for each in report["results"]:
        assert each["tokens_a_second"].keys() == {"stock", "marlin", "joined", "traced"}
        assert min(each["tokens_a_second"].values()) > 0
        assert 0 < each["host_ms"][0] <= each["host_ms"][1]
        assert 0 <= each["equal_tokens"]["marlin"] <= 1
    assert "joined x stock" in text


MODELS = ["llama-8b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b"]


@sampled(0, 2)
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("model", MODELS)
def test_variants_share_the_arrays_that_they_do_not_change(model: str) -> None:
    variants = ["--variants", "stock", "mlx", "marlin"]
    asked = generation.arguments(["--smoke", "--model", model, *variants])
    format = weights.Format("affine", 4, asked.group_size)

    models = dict(generation.built(asked, format))

    prompts = generation.random_prompts(2, 5, asked.sizes["vocab_size"])
    tokens = [generation.decode(model, prompts, 4).tokens for model in models.values()]
    assert tokens[0] == tokens[1] == tokens[2]
    stock, mlx, _ = (dict(tree_flatten(each.parameters())) for each in models.values())
    assert stock.keys() == mlx.keys()
    assert all(stock[name] is mlx[name] for name in stock)


@sampled(0, 2)
@pytest.mark.parametrize("model", MODELS)
def test_every_variant_and_number_of_streams_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, backend: Choose, model: str
) -> None:
    variants = ["--variants", "stock", "joined"]
    asked = generation.arguments(["--smoke", "--model", model, *variants])
    format = weights.Format("affine", 4, asked.group_size)
    backend("stock")
    assert generation.to_compile(asked, format) == []
    monkeypatch.setattr(generation.selection, "backend", lambda: "cuda")

    tasks = generation.to_compile(asked, format)

    monkeypatch.undo()
    assert {(task.args[0], task.args[-1]) for task in tasks} == {
        (name, streams) for name in ("stock", "joined") for streams in (1, 3)
    }
    for task in tasks:
        task()


FORMATS = ["affine4g128", "affine5g32:bfloat16", "affine8g64", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("name", FORMATS)
def test_weights_mean_what_mlx_takes_them_for(name: str) -> None:
    format = weights.Format.parse(name)
    words, scales, biases = native = weights.random_native(format, 40, 256)
    rows = np.array([0, 7, 39])
    wide = [each.astype(mx.float32) for each in (scales, biases) if each is not None]
    told = mx.dequantize(
        words,
        *(wide if biases is not None else (scales,)),
        group_size=format.group_size,
        bits=format.bits,
        mode=format.mode,
    )

    actual = weights.decoded(format, native, rows)

    expected = np.array(told.astype(mx.float32))[rows]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert 0.01 < actual.std() < 0.3


@pytest.mark.parametrize("name", ["affine7g64", "affine4g16", "mxfp4g32", "int4", ""])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is none of affine4g128"):
        weights.Format.parse(name)


def small_product(
    name: str = "affine4g64", layout: str = "mlx", rotated: int = 1
) -> tuple[products.Weights, mx.array]:
    """Returns weights of 128→64 in a format, and 3 rows of x."""
    format = weights.Format.parse(name)
    x = mx.random.normal((3, 128)).astype(mx.float16)
    return products.Weights((128, 64), format, layout, rotated), x


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, None), (1.01, "relative error"), (None, "raised")]
)
def test_a_wrong_product_is_named(factor: float | None, expected: str | None) -> None:
    drawn, x = small_product()
    oracle = products.Oracle(x, drawn)

    def call() -> mx.array:
        if factor is None:
            raise RuntimeError("no such kernel")
        w = mx.array(weights.decoded(drawn.format, drawn.native[0], np.arange(64)))
        return (factor * (x.astype(mx.float32) @ w.astype(mx.float32).T)).astype(
            mx.float16
        )

    wrong = products.check(call, [call], oracle, 1e-3)["wrong"]

    assert wrong is None if expected is None else expected in wrong


def test_a_product_that_changes_is_wrong() -> None:
    drawn, x = small_product()
    oracle = products.Oracle(x, drawn)
    y = drawn.calls(x)["stock"]()

    others = [lambda: y, lambda: y + 1e-3]
    wrong = products.check(lambda: y, others, oracle, 1e-2)["wrong"]

    assert wrong == "another result the second time"


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("affine4g64", "marlin"), ("symmetric8g32", "marlin"), ("mxfp4", "mlx")],
)
def test_traced_graphs_take_one_weight_after_the_other(name: str, layout: str) -> None:
    drawn, x = small_product(name, layout, 10_000)
    calls = drawn.calls(x)

    for who in ("ours", "stock"):
        build = drawn.traced(x, 3, who)
        for y in [*build(), *build()]:
            assert mx.array_equal(y, calls[who]())


def test_what_stock_refuses_is_timed_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, x = small_product()
    clock = cuda_timing.Clock(2, 1, 1, 1)

    def refuse(*_: Any) -> mx.array:
        raise ValueError("not these")

    monkeypatch.setattr(products, "product_of_stock", refuse)

    result = products.checked(drawn, x, products.Oracle(x, drawn))
    row = products.timed(drawn, x, result, clock, 1.0)

    assert (result["wrong"], result["stock_wrong"]) == (None, "not these")
    assert {"ours_us", "ours_traced_us", "matmul_us"} <= row.keys()
    assert not any(name.startswith(("stock", "times_stock")) for name in row)


def test_a_wrong_product_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"error": 1.0, "wrong": "relative error 1"}
    monkeypatch.setattr(products, "check", lambda *_: dict(answer))
    monkeypatch.setattr(sys, "argv", ["cuda.py", "--smoke", "--rows", "3"])

    assert cuda.main() == 1
    said = capsys.readouterr().out
    assert "WRONG 3 rows of 256→96, affine4g128:float16, layout marlin" in said
    assert "2 products, 2 wrong" in said


def of_zeros(
    *, output_shapes: list[list[int]], output_dtypes: list[mx.Dtype], **_: Any
) -> list[mx.array]:
    """Stands in for a CUDA kernel."""
    return [*map(mx.zeros, output_shapes, output_dtypes)]


def test_each_kernel_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, backend: Choose
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: of_zeros)
    backend("cuda")
    formats = [weights.Format.parse(name) for name in ("affine4g128", "mxfp4")]

    tasks = instances.needed(formats, [(1024, 3584)], [1, 2, 8, 16], "marlin")

    given = [task.args for task in tasks]
    stock = [(str(format), m) for name, format, _, _, m in given if name == "stock"]
    ours = [(str(format), m) for name, format, _, _, m in given if name == "ours"]
    of_each = [(str(format), m) for format in formats for m in (1, 2, 8, 16)]
    assert stock == of_each
    # One to 8 rows have the same kernel.
    assert ours == [(str(format), m) for format in formats for m in (8, 16)]


def test_a_task_that_fails_does_not_stop_what_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(compiling.FOLDER, str(tmp_path))
    format = weights.Format.parse("affine4g64")
    tasks = [
        partial(instances.evaluate, "stock", format, "marlin", (k, 32), 2)
        for k in (64, 63)
    ]
    said: list[str] = []

    compiling.compile_ahead(tasks, said.append)

    failed, done = said
    assert failed.startswith("not compiled ahead: ValueError")
    assert "2 tasks" in done
    assert not any(tmp_path.iterdir())


def test_what_was_compiled_is_handed_over_whole(tmp_path: Path) -> None:
    own = tmp_path / f"{compiling.PRIVATE}1" / "worker"
    (own / "long").mkdir(parents=True)
    for name in ("new.ptx", "new.txt", "long/name.ptx", "old.ptx"):
        (own / name).write_text(f"own {name}")
    (tmp_path / "old.ptx").write_text("shared")

    compiling.publish(own, tmp_path)

    files = compiling._files(tmp_path)
    kept = {str(file): (tmp_path / file).read_text() for file in files}
    assert kept == {
        "old.ptx": "shared",
        "new.ptx": "own new.ptx",
        "new.txt": "own new.txt",
        "long/name.ptx": "own long/name.ptx",
    }


def test_every_use_of_a_weight_is_far_from_the_last() -> None:
    format = weights.Format.parse("affine4g128")
    drawn = products.Weights((256, 32), format, "marlin", 10_000)

    for copies, nbytes in (
        (drawn.ours, drawn.nbytes),
        (drawn.stock, drawn.nbytes),
        (drawn.floats, 2 * 256 * 32),
    ):
        assert (len(copies) - 1) * nbytes >= 10_000


def test_what_is_asked_for_is_judged() -> None:
    row = {"k": 5120, "n": 17408, "format": str(summary.TARGET_FORMAT)}
    results = [
        {**row, "rows": 5, "ours_us": 21.0},
        {**row, "rows": 16, "ours_us": 21.1},
        {**row, "rows": 24, "ours_us": 99.0},
        {**row, "rows": 64},
        {**row, "rows": 32, "ours_us": 1.0, "format": "mxfp4:float16"},
    ]

    judged = summary.acceptance(results)

    assert [(each["rows"], each["passed"]) for each in judged] == [
        (5, True),
        (16, False),
        (64, False),
    ]


def test_slower_is_beyond_the_clocks_noise() -> None:

    assert summary.is_slower({"ours_us": 10.3, "stock_us": 10.0})
    assert not summary.is_slower({"ours_us": 10.1, "stock_us": 10.0})
    assert not summary.is_slower({"ours_us": 10.1})
    assert summary.is_slower({"ours_stream_us": 10.3, "stock_stream_us": 10}, "_stream")


def test_a_line_says_what_is_asked_for() -> None:
    format = summary.TARGET_FORMAT
    row = {"k": 5120, "n": 17408, "format": str(format), "rows": 3, "wrong": None}
    row |= {"ours_us": 20.5, "served_by_stock": None}

    head = summary.title((5120, 17408), format, "marlin").splitlines()[-1]
    line = summary.line(row)

    end = head.index("at most") + len("at most")
    assert line[:end].endswith(" 21.0")
    assert line[: head.index("ours eval") + len("ours eval")].endswith(" 20.5")


def test_shapes_are_models_or_pairs() -> None:
    asked = cuda.arguments(["--shapes", "64x32", "llama-70b", "8192→8192"])

    assert asked.shapes == [(64, 32), (8192, 28672), (28672, 8192), (8192, 8192)]
    with pytest.raises(SystemExit):
        cuda.arguments(["--shapes", "64"])
    with pytest.raises(SystemExit):
        cuda.arguments(["--layout", "mlx", "--formats", "symmetric4g64"])
