"""A real Chromium (`tools/setup_chromium.sh`), driven through its debugging pipe: JSON messages that end with NUL."""

from __future__ import annotations

import base64
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
    # A page that is not in front works as if it were.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)
READY_SECONDS = 180.0
SETUP = Path(__file__).with_name("setup_chromium.sh")
# Chromium reads commands from 3 and writes answers to 4. They are moved there from descriptors that are free.
START = 'exec {in}<&"$1" {out}>&"$2"; shift 2; exec 3<&$in 4>&$out; exec "$@"'
# What a page should not cause: the event, and where its text is.
_PROBLEMS = {
    "Runtime.exceptionThrown": ("exceptionDetails",),
    "Log.entryAdded": ("entry",),
    "Runtime.consoleAPICalled": ("args",),
}


def chromium() -> Path:
    """Fetched if it is missing."""
    subprocess.run([SETUP], check=True)
    cache = os.environ.get("RANKSCOPE_CHROMIUM_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(cache) if cache else home / "rankscope" / f"chromium-{platform.machine()}") / "chromium"


class CallError(AssertionError):
    """Chromium's answer is an error."""


class Browser:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = b""
        self._calls = 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new one, beside the others."""
        target = self.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]  # tabs hide each other
        return self.attached(target)

    def attached(self, target: str) -> Page:
        """A page, or a frame that has a process of its own."""
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Log", "Runtime", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise CallError(answer)
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("sessionId") in self._pages:
                self._pages[answer["sessionId"]].events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 1 << 16)
            assert part, "Chromium ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser = browser
        self.events: list[dict[str, Any]] = []
        self._session, self._target = session, target

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self.browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self._target)

    def open(self, address: str, width: int = 1000, height: int = 600, is_dark: bool = False) -> None:
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        before = self._loader()
        is_new = "loaderId" in self.call("Page.navigate", url=address)  # not for another place in the same document
        deadline = time.monotonic() + READY_SECONDS
        while is_new and self._loader() == before:  # the page before, which may have the same address
            assert time.monotonic() < deadline, f"{address} is not loaded"
            time.sleep(0.01)
        self.wait_for(f"document.readyState === 'complete' && location.href !== 'about:blank' && {_same(address)}")

    def _loader(self) -> str:
        return str(self.call("Page.getFrameTree")["frameTree"]["frame"]["loaderId"])

    def leave(self) -> None:
        """It sends no request from now on."""
        self.open("about:blank#")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def value(self, expression: str) -> Any:
        """Of an expression, or of its promise."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
                break
            except CallError as error:
                # Between two documents, nothing is evaluated.
                if "Cannot find default execution context" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = READY_SECONDS) -> Any:
        """Its value, once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"waited in vain for {expression}"
            time.sleep(0.05)
        return value

    def center(self, selector: str) -> tuple[float, float]:
        """Of the element, which is scrolled to."""
        left, top = self.value(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView({block: 'center'}); const box = element.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        return left, top

    def point(self, left: float, top: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)

    def click(self, left: float, top: float) -> None:
        place = {"x": left, "y": top, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (left, top) in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            self.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1)

    def type(self, text: str) -> None:
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Exceptions, errors and warnings until now. Violations of the content security policy are among them."""
        self.value("0")  # events that were sent before are here then
        found = []
        for event in self.events:
            parameters = event["params"]
            kind = parameters.get("entry", {}).get("level", parameters.get("type", "error"))
            if event["method"] in _PROBLEMS and kind in ("error", "warning", "assert"):
                found += [json.dumps(parameters.get(name)) for name in _PROBLEMS[event["method"]]]
        return found


def _same(address: str) -> str:
    """That the page is not the one before: compared without what the page itself changes."""
    return f"location.href.split('?')[0] === new URL({json.dumps(address)}).href.split('?')[0]"


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Browser]:
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    command = ["bash", "-c", START, "bash", str(to_read), str(to_write), str(chromium()), *OPTIONS, *options]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        pass_fds=(to_read, to_write),
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # it ends with its pipe
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(answers)


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    with browser(folder) as started:
        yield started.page()
