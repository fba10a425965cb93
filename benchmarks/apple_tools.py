"""Apple's Metal compilers, which need no GPU: `xcrun metal` and `xcrun metal-tt`.

Since Xcode 26 they are a component of their own, which an image may lack or not select
(github.com/actions/runner-images/issues/14013 and 14548, screenpipe pull request 6568).
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from metal_emulator.static.versions import language_of, parsed

ARCHITECTURES = tuple(f"applegpu_g{n}{size}" for n in range(13, 18) for size in "gs")
"""Of M1 to M5, the base chip and the larger ones; those of Ultra are as Max."""
COMPONENT = "MetalToolchain"
IDENTIFIER = re.compile(r"com\.apple\.dt\.toolchain\.Metal[\w.]*")
METAL = ("xcrun", "-sdk", "macosx", "metal")
MLX_HEADERS = Path(mx.__file__).parent / "include"
PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
"""What MLX puts before a custom kernel: this header, with those that it includes."""
DOWNLOAD_SECONDS = 600.0
PROBE_SECONDS = 60.0
SHOWN = 3
"""Lines of a tool's output that are kept."""


class ToolError(RuntimeError):
    """A tool is missing, failed or did not end; the message is one line."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Compilers that answered.

    Attributes:
        environment: Variables that select them.
        version: First line of `metal --version`.
        macos: Version of macOS, such as "26.2".
        limit: Seconds after which a compiler is killed.
    """

    environment: Mapping[str, str]
    version: str
    macos: str
    limit: float

    @property
    def standard(self) -> str:
        """The language in which MLX compiles here, such as "metal4.0"."""
        return "metal{}.{}".format(*language_of(self.macos))

    def compile(self, text: str, library: Path) -> str:
        """Compiles Metal text as MLX does; returns what the compiler said.

        MLX's math mode "safe" is `-fno-fast-math`.

        Args:
            text: The text, as MLX generates it.
            library: The file to write.

        Raises:
            ToolError: If it does not compile.
        """
        source = library.with_suffix(".metal")
        source.write_text(PRELUDE + text, encoding="ascii")
        oldest = ".".join(map(str, parsed(self.macos)))
        flags = (f"-std={self.standard}", "-O2", "-fno-fast-math")
        where = ("-I", str(MLX_HEADERS), str(source), "-o", str(library))
        command = (*METAL, *flags, f"-mmacosx-version-min={oldest}", *where)
        return run(command, self.limit, self.environment)

    def translate(self, library: Path, function: str, architecture: str) -> bytes:
        """Runs the native compiler of an architecture; returns its file.

        MLX states no number of threads when it makes a pipeline, and neither is one
        here.

        Args:
            library: A file of `compile`.
            function: Name of the kernel.
            architecture: Such as "applegpu_g13g".

        Raises:
            ToolError: If the compiler fails, or does not know the architecture.
        """
        script = library.with_suffix(f".{architecture}.mtlp-json")
        pipelines = {"compute_pipelines": [{"compute_function": function}]}
        script.write_text(json.dumps({"pipelines": pipelines}), encoding="ascii")
        out = library.with_suffix(f".{architecture}")
        files = (str(script), str(library), "-o", str(out))
        command = (*METAL[:-1], "metal-tt", "-arch", architecture, *files)
        run(command, self.limit, self.environment)
        try:
            return out.read_bytes()
        except OSError as error:
            raise ToolError(f"metal-tt wrote no file: {error.strerror}") from None


def find(limit: float) -> Toolchain:
    """Returns the compilers: those selected, else the component's, else downloaded.

    Args:
        limit: Seconds after which a compiler is killed.

    Raises:
        ToolError: If there are none.
    """
    reasons: list[str] = []
    for environment in _environments(reasons):
        try:
            said = run((*METAL, "--version"), PROBE_SECONDS, environment)
            run(("xcrun", "-f", "metal-tt"), PROBE_SECONDS, environment)
            macos = run(("sw_vers", "-productVersion"), PROBE_SECONDS).strip()
            return Toolchain(environment, said.splitlines()[0], macos, limit)
        except (ToolError, IndexError) as error:
            reasons.append(str(error) or "no version")
    raise ToolError(f"Apple's Metal compilers are missing: {reasons[0]}")


def _environments(reasons: list[str]) -> Iterator[Mapping[str, str]]:
    """Yields variables to try; downloads the component if none before sufficed."""
    yield {}
    yield from _selected()
    try:
        command = ("xcodebuild", "-downloadComponent", COMPONENT)
        run(command, DOWNLOAD_SECONDS)
    except ToolError as error:
        reasons.append(str(error))
        return
    yield {}
    yield from _selected()


def _selected() -> Iterator[Mapping[str, str]]:
    """Yields what selects an installed component."""
    try:
        said = run(("xcodebuild", "-showComponent", COMPONENT), PROBE_SECONDS)
    except ToolError:
        return
    for found in IDENTIFIER.findall(said)[:1]:
        yield {"TOOLCHAINS": found}


def run(
    command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a tool; returns its output, that to standard error included.

    Raises:
        ToolError: If it cannot start, fails, or takes longer than `limit` seconds.
    """
    tool = next(word for word in command if word not in ("xcrun", "-sdk", "macosx"))
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            timeout=limit,
        )
    except OSError as error:
        raise ToolError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"{tool} did not end in {limit:g} s") from None
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        lines = [line.strip() for line in said.splitlines() if "error" in line]
        reason = "; ".join((lines or said.split("\n"))[:SHOWN])
        raise ToolError(f"{tool} ended with {done.returncode}: {reason}")
    return said
