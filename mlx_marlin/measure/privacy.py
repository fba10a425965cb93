"""Removes what identifies a person or a machine from texts of a result file."""

import getpass
import os
import platform
import re
from pathlib import Path

LONGEST = 300
"""Characters of a text that are kept."""
PATH = re.compile(r"(?<![\w.])[~.]*/[^\s'\"`,;:()<>|]+")
"""Paths, absolute or from the home folder."""
UNPRINTABLE = re.compile(r"[^ -~→]|[<>|`]")
LONGEST_NAME = 120
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9 ._,()+:/#~=-]")
SHORTEST_NAME = 3
"""Shorter names of users and hosts are parts of ordinary words."""


def as_name(text: str) -> str:
    """Returns the name of a chip, system, version or model without markup."""
    return NOT_IN_NAMES.sub("-", text)[:LONGEST_NAME]


def redacted(text: str) -> str:
    """Returns a text without paths, user name and host name, in printable
    characters."""
    home = _home()
    at_home = text.replace(home, "/home") if home else text  # it may have a space
    kept = PATH.sub("PATH", " ".join(at_home.split()))
    for name, replacement in _names().items():
        kept = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, kept, flags=re.I)
    return UNPRINTABLE.sub("?", kept)[:LONGEST]


def _names() -> dict[str, str]:
    """Returns names of the user and the host, the longest first."""
    host = platform.node()
    names = {host: "HOST", host.split(".")[0]: "HOST"}
    for user in (_user(), Path(_home()).name):
        names[user] = "USER"
    known = {name: names[name] for name in names if len(name) >= SHORTEST_NAME}
    return dict(sorted(known.items(), key=lambda item: -len(item[0])))


def _home() -> str:
    """Returns the user's home folder, or "", as in some containers."""
    home = os.path.expanduser("~")
    return home if os.path.isabs(home) else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such name, as in some containers
        return ""
