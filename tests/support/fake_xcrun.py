#!/usr/bin/env python3
"""Answers like Apple's tools, under the names by which it is linked.

`xcrun` (metal, metal-tt, -f), `xcodebuild` and `sw_vers`. Argument lists that the tools
would not take fail. The variable FAKE_XCRUN holds JSON that plants faults:

    missing   "default": only TOOLCHAINS selects the compilers; "component": they appear
              once downloaded; "always"
    macos     version of macOS
    error     part of the text or name of a kernel that does not compile
    spill     likewise, of one that spills; "misread" of all that report no registers
    hang      likewise, of one for which the compiler does not end
    unknown   architectures that metal-tt does not know
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

from support.gpu_files import gpu_file

PLANTED = json.loads(os.environ.get("FAKE_XCRUN", "{}"))
TOOLCHAIN = "com.apple.dt.toolchain.Metal.32023.883"
DOWNLOADED = Path(sys.argv[0]).with_name("downloaded")
MISSING = (
    "error: error: cannot execute tool 'metal' due to missing Metal Toolchain; use: "
    "xcodebuild -downloadComponent MetalToolchain"
)
CEILING = 96
"""Registers of a thread."""


def main(name: str, words: list[str]) -> None:
    {"xcrun": xcrun, "xcodebuild": xcodebuild, "sw_vers": sw_vers}[name](words)


def sw_vers(words: list[str]) -> None:
    demand(words == ["-productVersion"], f"sw_vers: {words}")
    print(PLANTED.get("macos", "26.2"))


def xcodebuild(words: list[str]) -> None:
    command, *rest = words
    demand(rest == ["MetalToolchain"], f"xcodebuild: {words}")
    if command == "-downloadComponent":
        demand(PLANTED.get("missing") == "component", "error: download failed")
        DOWNLOADED.touch()
    else:
        demand(command == "-showComponent", f"xcodebuild: {words}")
        demand(PLANTED.get("missing") == "default", "Status: not installed")
        print(f"Status: installed\nToolchain Identifier: {TOOLCHAIN}")


def is_there() -> bool:
    missing = PLANTED.get("missing")
    if missing == "default":
        return os.environ.get("TOOLCHAINS") == TOOLCHAIN
    return missing is None or (missing == "component" and DOWNLOADED.exists())


def xcrun(words: list[str]) -> None:
    if words[:1] == ["-f"]:
        demand(words == ["-f", "metal-tt"] and is_there(), MISSING)
        print("/toolchain/usr/bin/metal-tt")
        return
    demand(words[:2] == ["-sdk", "macosx"] and is_there(), MISSING)
    _, _, tool, *rest = words
    {"metal": metal, "metal-tt": metal_tt}[tool](rest)


def metal(words: list[str]) -> None:
    if words == ["--version"]:
        print("Apple metal version 32023.883 (metalfe-32023.883)\nThread model: posix")
        return
    standard, optimize, math, oldest, include, folder, source, out, library = words
    given = (optimize, math, include, out)
    demand(given == ("-O2", "-fno-fast-math", "-I", "-o"), f"error: metal: {words}")
    demand(re.fullmatch(r"-std=metal(3\.1|3\.2|4\.0|4\.1)", standard), "error: -std")
    demand(re.fullmatch(r"-mmacosx-version-min=\d+\.\d+", oldest), f"error: {oldest}")
    text = Path(source).read_text(encoding="ascii")
    for header in re.findall(r'^#include "(.*)"', text, re.MULTILINE):
        demand((Path(folder) / header).is_file(), f"error: no file {header}")
    names = re.findall(r"(?:\[\[kernel\]\]|kernel) void (\w+)\(", text)
    demand(names, "error: no kernel")
    if is_planted("hang", text):
        signal.pause()
    if is_planted("error", text):
        where = f"{source}:7:3"
        print(f"{where}: error: use of undeclared identifier 'planted'", flush=True)
        sys.exit("1 error generated.")
    print(f"{source}:9:1: warning: unused variable 'u' [-Wunused-variable]")
    Path(library).write_text(json.dumps(names), encoding="ascii")


def metal_tt(words: list[str]) -> None:
    option, architecture, script, library, out, target = words
    demand((option, out) == ("-arch", "-o"), f"error: metal-tt: {words}")
    demand(architecture not in PLANTED.get("unknown", ()), "error: unknown target")
    (pipelines,) = json.loads(Path(script).read_text(encoding="ascii")).values()
    ((pipeline,),) = pipelines.values()
    (name,) = pipeline.values()
    demand(name in json.loads(Path(library).read_text()), f"error: no {name}")
    Path(target).write_bytes(kernel_file(name))


def kernel_file(name: str) -> bytes:
    if is_planted("misread", name):
        return gpu_file(5, 0, 64)
    live = re.fullmatch(r"live_(\d+)", name)
    wanted = int(live[1]) + 4 if live else 60
    if wanted > CEILING or is_planted("spill", name):
        return gpu_file(CEILING, 4 * wanted + 16, 4096)
    return gpu_file(wanted, 0, 2048)


def is_planted(fault: str, text: str) -> bool:
    return fault in PLANTED and PLANTED[fault] in text


def demand(is_met: object, message: str) -> None:
    if not is_met:
        sys.exit(message)


if __name__ == "__main__":
    main(Path(sys.argv[0]).name, sys.argv[1:])
