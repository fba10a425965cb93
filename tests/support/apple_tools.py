"""Puts the stand-ins for Apple's tools (`fake_xcrun`) into a folder."""

import sys
from pathlib import Path

TOOLS = ("xcrun", "xcodebuild", "sw_vers")
TESTS = Path(__file__).parents[1]


def link_tools(folder: Path) -> None:
    """Writes a program for each tool into a new folder."""
    folder.mkdir()
    for name in TOOLS:
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(TESTS)!r})\n"
            f"from support.fake_xcrun import main\nmain({name!r}, sys.argv[1:])\n"
        )
        program.chmod(0o755)
