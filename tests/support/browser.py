"""Chromium without a window, controlled over the pipe of its debugging protocol."""

import fcntl
import json
import os
import shutil
import signal
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

from support.processes import HANG_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMANDS_FD, EVENTS_FD = 3, 4
"""Descriptors on which Chromium reads commands and writes answers and events."""
OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run"),
    *("--no-default-browser-check", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb"),
)


def executable() -> str | None:
    """Returns the path of Chromium, or None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._answers = commands, events
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._count:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def open(
        self, path: Path, *, width: int, scheme: str, scripts: bool = True
    ) -> None:
        """Opens a file and waits until it is loaded."""
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 800,
        )
        self.call("Page.navigate", url=path.as_uri())
        while not any(
            event.get("method") == "Page.loadEventFired" for event in self.events
        ):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, expression: str) -> None:
        """Clicks into the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def type(self, text: str) -> None:
        """Types a text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def photograph(self) -> bytes:
        """Returns a picture of the whole page as PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return b64decode(picture["data"])

    def complaints(self) -> list[str]:
        """Returns errors and messages of the page, and what it wanted to load."""
        found = []
        for event in self.events:
            method, parameters = event.get("method", ""), event.get("params", {})
            if method in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
            ):
                found.append(f"{method}: {parameters}")
            if method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                # An image in the page is loaded from nowhere.
                found += [] if url.startswith("data:") else [url]
        return found

    def _next(self) -> dict[str, Any]:
        """Returns the next message of the browser."""
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._answers], [], [], HANG_SECONDS)
            chunk = os.read(self._answers, 2**16) if ready else b""
            if not chunk:
                raise RuntimeError("Chromium does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Starts Chromium and ends it."""
    read_commands, commands = map(_above, os.pipe())
    answers, write_answers = map(_above, os.pipe())
    log = profile / "chromium.log"
    process = os.posix_spawn(
        program,
        [program, *OPTIONS, *_sandbox(), f"--user-data-dir={profile / 'data'}"],
        _environment(profile),
        file_actions=[
            (os.POSIX_SPAWN_DUP2, read_commands, COMMANDS_FD),
            (os.POSIX_SPAWN_DUP2, write_answers, EVENTS_FD),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text(errors='replace')}") from error
    finally:
        os.close(commands)
        os.close(answers)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _above(descriptor: int) -> int:
    """Returns a copy of a descriptor above those that Chromium uses."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy


def _sandbox() -> tuple[str, ...]:
    """Returns the option without which Chromium refuses to run as root."""
    return ("--no-sandbox",) if os.getuid() == 0 else ()


def _environment(home: Path) -> Mapping[str, str]:
    return {**os.environ, "HOME": str(home)}
