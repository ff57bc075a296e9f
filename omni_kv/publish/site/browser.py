"""A headless Chromium, told what to do over the DevTools protocol: prints pages, and tests them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

#: Names a browser that is not on the PATH.
BROWSER_VARIABLE = "OMNI_KV_CHROMIUM"

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-allow-origins=*",
)


#: Resolves when fonts and pictures are decoded and two frames have been drawn with them.
_DRAWN = """
Promise.all([document.fonts.ready, ...Array.from(document.images, i => i.decode().catch(() => 0))])
  .then(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))))
  .then(() => true)
"""


class BrowserError(RuntimeError):
    """The browser did not start, did not answer, or refused a command."""


def find_chromium() -> str | None:
    """The browser that ``OMNI_KV_CHROMIUM`` names, or the first one on the PATH."""
    given = os.environ.get(BROWSER_VARIABLE)
    if given is not None:
        return shutil.which(given)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a headless Chromium with a profile of its own; closed with the ``with`` block.

    Attributes:
        events: what the page reported since it was opened, as (method, parameters).
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._last = 0

    def __enter__(self) -> Browser:
        path = find_chromium()
        if path is None:
            raise BrowserError("no Chromium was found")
        self._profile = tempfile.mkdtemp(prefix="omni-kv-chromium-")
        command = [path, *QUIET, f"--user-data-dir={self._profile}", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._connect()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._close()

    def open(self, url: str) -> None:
        """Load a page, and wait until it and what it refers to are there, and are drawn."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self._until(lambda: any(method == "Page.loadEventFired" for method, _ in self.events))
        self.evaluate(_DRAWN)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the window's size in pixels, and whether the reader asked for a dark page."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write the whole page, as high as it is, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print_pdf(self) -> bytes:
        """The page as a PDF, with the page sizes of its own style and an outline."""
        answer = self.call(
            "Page.printToPDF",
            printBackground=True,
            preferCSSPageSize=True,
            generateDocumentOutline=True,
            generateTaggedPDF=True,
        )
        return base64.b64decode(answer["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its answer; events on the way are kept.

        Raises:
            BrowserError: If the browser refuses it or does not answer in time.
        """
        self._last += 1
        number = self._last
        answers: list[dict[str, Any]] = []
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        self._until(lambda: bool(answers), number, answers)
        if "error" in answers[0]:
            raise BrowserError(f"{method}: {answers[0]['error']['message']}")
        return answers[0]["result"]

    def _until(
        self, done: Callable[[], bool], number: int = 0, answers: list[Any] | None = None
    ) -> None:
        from websocket import WebSocketException

        end = time.monotonic() + self.timeout
        while not done():
            if time.monotonic() > end:
                raise BrowserError(f"the browser did not answer within {self.timeout:.0f} s")
            try:
                message = json.loads(self._socket.recv())
            except (OSError, WebSocketException) as error:
                raise BrowserError(f"lost the browser: {error}") from error
            if "method" in message:
                self.events.append((message["method"], message.get("params", {})))
            elif answers is not None and message.get("id") == number:
                answers.append(message)

    def _connect(self) -> None:
        from urllib.request import urlopen

        import websocket

        port_file, end = Path(self._profile, "DevToolsActivePort"), time.monotonic() + self.timeout
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if self._process.poll() is not None or time.monotonic() > end:
                raise BrowserError("Chromium did not start")
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(t for t in json.load(answer) if t["type"] == "page")
        self._socket = websocket.create_connection(
            page["webSocketDebuggerUrl"], timeout=self.timeout
        )
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)
