"""`mlx-marlin lm server`: streams at a time, a client that leaves, a bad request."""

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

import mlx.core as mx
import pytest

import metal_emulator
from support import quantized_folder
from support.processes import HANG_SECONDS

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
