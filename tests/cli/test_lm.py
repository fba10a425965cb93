"""`mlx-marlin lm`: mlx-lm's own commands, the server among them, on our kernels."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.cli
import mlx_lm.generate
import mlx_lm.utils
import pytest

import metal_emulator
from cli.conftest import Run
from mlx_marlin.cli.main import main
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import options
from support import auto_hook, quantized_folder
from support.choose import Choose
from support.processes import HANG_SECONDS

GENERATE = sys.modules["mlx_lm.generate"]  # `mlx_lm.generate` is a function too


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(options.ENVIRONMENT, raising=False)
    yield
    auto_hook.remove()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lists the arguments of mlx-lm's `generate`, which does nothing."""
    found: list[list[str]] = []
    monkeypatch.setattr(GENERATE, "main", lambda: found.append(sys.argv))
    return found


def test_the_text_is_that_of_mlx_lm(
    folder: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend("stock" if metal_emulator.unavailable() else "emulator")
    words = ["--model", str(folder), "--prompt", "def main():", "--max-tokens", "8"]
    words += ["--verbose", "F", "--ignore-chat-template"]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *words])
    GENERATE.main()
    expected = capsys.readouterr().out
    models = []
    own = GENERATE.load
    monkeypatch.setattr(
        GENERATE, "load", lambda *a, **k: models.append(own(*a, **k)) or models[0]
    )

    assert main(["lm", "--layout", "marlin", "--join", "generate", *words]) == 0

    said = capsys.readouterr()
    assert said.out == expected != ""
    (line,) = [each for each in said.err.splitlines() if "mlx-marlin" in each]
    name = "stock" if metal_emulator.unavailable() else "emulator"
    ours = 0 if name == "stock" else 17
    # of 4 layers with 4 products each, since some are joined, and the head
    assert line == (
        f"mlx-marlin: quantized: 17 of 17 quantized products are converted; our "
        f"kernels serve {ours} at 1, {ours} at 2, {ours} at 4, {ours} at 8, {ours} at "
        f"16 rows (back end {name})"
    )
    (layer,) = {type(m) for m in models[0][0].modules() if isinstance(m, MarlinLinear)}
    assert layer is MarlinLinear
    assert "joined" in models[0][0].layers[0].self_attn.q_proj


def test_arguments_are_passed_on_unchanged(called: list[list[str]]) -> None:
    words = ["--trace", "--lay", "mlx", "-m", "--help", "--", "x y", "-", "--version"]
    before = sys.argv

    assert main(["lm", "generate", *words]) == 0

    assert called == [["mlx_lm.generate", *words]]
    assert sys.argv is before


@pytest.mark.usefixtures("stock")
def test_our_options_win_over_the_environment(
    called: list[list[str]], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv(options.ENVIRONMENT, "layout=marlin,join=true")

    assert main(["lm", "--no-join", "generate"]) == 0

    layer = mlx_lm.utils.load_model(folder)[0].layers[0].self_attn.q_proj
    assert "joined" not in layer
    assert layer.packed is not None


@pytest.mark.slow
@pytest.mark.usefixtures("stock")
def test_compute_converts_what_is_loaded(
    called: list[list[str]], tmp_path: Path
) -> None:
    folder = quantized_folder.write(tmp_path / "bfloat16", mx.bfloat16)

    assert main(["lm", "--compute", "float16", "generate"]) == 0

    model = mlx_lm.utils.load_model(folder)[0]
    assert model.layers[0].self_attn.q_proj.scales.dtype == mx.float16


@pytest.mark.parametrize("words", ["compile --port 1", ""])
def test_an_unknown_command_is_one_line_with_the_commands(
    words: str, refused: Run
) -> None:
    said = refused(f"lm {words}")

    assert said.startswith("mlx-marlin: error: lm: CLI requires a subcommand in (")
    assert "'generate'" in said


@pytest.mark.parametrize("status", [0, 2, 7])
def test_the_exit_status_is_that_of_mlx_lm(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GENERATE, "main", lambda: sys.exit(status))

    with pytest.raises(SystemExit) as ended:
        main(["lm", "generate"])

    assert ended.value.code == status


def test_an_error_of_mlx_lm_is_shown_as_python_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Any:
        raise ValueError("of mlx-lm")

    monkeypatch.setattr(GENERATE, "main", fail)

    assert main(["lm", "generate"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "ValueError: of mlx-lm" in error


@pytest.mark.parametrize("name", ["none", "llama"])
def test_a_model_that_mlx_lm_cannot_load_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    mx.save_safetensors(str(tmp_path / "model"), {"a": mx.zeros(1)})

    assert main(["lm", "generate", "--model", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert f"cannot load the model '{tmp_path}'" in error
    assert "Traceback" not in error


def test_a_bad_variable_is_one_line(
    called: list[list[str]], monkeypatch: pytest.MonkeyPatch, refused: Run
) -> None:
    monkeypatch.setenv(options.ENVIRONMENT, "join=maybe")

    assert "expected join=true or false" in refused("lm generate")
    assert not called


PROMPTS = [
    "def main():\n    ",
    "import os\n",
    "class Node:\n    def ",
    "for i in range(",
    "while True:\n    ",
    "return self.",
    "if name in ",
    "def read_lines(path):\n    ",
]
TOKENS = 8


@contextmanager
def serving(
    folder: Path, errors: Path, *command: str, **environment: str
) -> Iterator[int]:
    """Runs a server, and yields its port once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", str(folder), "--port", str(port)]
    with errors.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *words],
            env=os.environ | environment,
            stdout=said,
            stderr=said,
        )
        try:
            while not answers(port):
                assert process.poll() is None, errors.read_text()
                time.sleep(0.1)
            yield port
        finally:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def post(port: int, body: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    connection.request("POST", "/v1/completions", body)
    return connection.getresponse()


def request(prompt: str, tokens: int = TOKENS) -> str:
    fields = {"prompt": prompt, "stream": True, "max_tokens": tokens, "temperature": 0}
    return json.dumps(fields)


def text(port: int, prompt: str) -> str:
    """Returns what a server streams for a prompt."""
    answer = post(port, request(prompt))
    assert answer.status == 200
    lines = [line.removeprefix(b"data: ") for line in answer if b"data: " in line]
    assert lines.pop().strip() == b"[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def leave(port: int) -> None:
    """Closes the connection after the first part of an answer."""
    answer = post(port, request("def leave():", tokens=200))
    assert answer.readline()
    answer.close()


def leave_at_once(port: int) -> None:
    """Asks for a long answer that is not streamed, and closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    fields = {"prompt": "def leave():", "max_tokens": 1_000_000, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(fields))
    connection.close()


def texts(port: int) -> list[str]:
    """Returns the texts of all prompts at once, while another client leaves."""
    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        leaving = pool.submit(leave, port)
        found = [*pool.map(lambda prompt: text(port, prompt), PROMPTS)]
        leaving.result()
    return found


@pytest.mark.slow
def test_streams_have_the_text_of_mlx_lms_server(tmp_path: Path) -> None:
    folder = quantized_folder.write(tmp_path / "quantized", mx.float32)
    said, ours = tmp_path / "stock.txt", tmp_path / "ours.txt"
    with serving(folder, said, "mlx_lm.server") as port:
        expected = [text(port, prompt) for prompt in PROMPTS]
        refused = post(port, "{").status
    backend = "stock" if metal_emulator.unavailable() else "emulator"
    settings = {"MLX_MARLIN_BACKEND": backend, "MLX_MARLIN_LOG": "1"}

    joined = ("--layout", "marlin", "--join", "--trace")
    for given in (joined, ("--lookup",)):
        command = ("mlx_marlin", "lm", *given, "server")
        with serving(folder, ours, *command, **settings) as port:
            assert texts(port) == expected, ours.read_text()
            answer = post(port, "{")
            assert answer.status == refused == 400
            assert "Invalid JSON" in json.load(answer)["error"]
            leave_at_once(port)
            assert text(port, PROMPTS[0]) == expected[0]
        served = ours.read_text()
        assert served.count("mlx-marlin: quantized: ") == 1
        assert backend == "stock" or "gemv" in served or "gemm_register" in served

    assert all(expected)
