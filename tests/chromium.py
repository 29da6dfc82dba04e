"""Drives a headless Chromium over its DevTools protocol, through a pipe: the standard library is enough.

`python tests/chromium.py PAGE.html OUT.png [--dark] [--size 1400x1800]` makes a screenshot.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What would ask the network, or needs what a container lacks, is switched off.
_OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions", "dev-shm-usage")
_FLAGS = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb"]
_FLAGS += ["--remote-debugging-pipe", *(f"--disable-{each}" for each in _OFF)]
READY = "document.documentElement?.dataset.ready"  # set by the page of an inspection when it shows a map
_PATIENCE = 60.0  # seconds for one answer, on a machine that does other things as well


def executable() -> str | None:
    """POISE_CHROMIUM, or the first of the usual names that is installed."""
    return os.environ.get("POISE_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page, what it has complained about and what it has asked the network for."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._number, self._pending = to, back, 0, b""
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            heard = self._read(end)
            if heard.get("id") != self._number:
                self._note(heard)
                continue
            if "error" in heard:
                raise RuntimeError(f"{method}: {heard['error']['message']}")
            answer: dict[str, Any] = heard["result"]
            return answer

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            if not select.select([self._back], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium has not answered for {_PATIENCE:.0f} s")
            more = os.read(self._back, 1 << 20)
            if not more:
                raise RuntimeError("Chromium has ended")
            self._pending += more
        message, self._pending = self._pending.split(b"\0", 1)
        heard: dict[str, Any] = json.loads(message)
        return heard

    def _note(self, heard: dict[str, Any]) -> None:
        told = heard.get("params", {})
        if heard.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif heard.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(each.get("value")) for each in told["args"]))
        elif heard.get("method") == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif heard.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def dark(self, dark: bool) -> None:
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def open(self, path: Path, ready: str) -> None:
        """Opens a file and waits until the expression `ready` holds."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(ready)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not come true; the page complained: {self.complaints}")
            time.sleep(0.02)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a Chromium of its own."""
    path = executable()
    if path is None:
        raise FileNotFoundError("no Chromium is installed: run scripts/install_chromium.sh, or set POISE_CHROMIUM")
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    redirected = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", redirected, path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Page(to, back)
            yield page
            page.call("Page.close")
        finally:
            os.close(to)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(back)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1400x1800")
    parser.add_argument("--do", default="0", help="JavaScript to run first")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    with browser() as page:
        page.size(width, height)
        page.dark(options.dark)
        page.open(options.page, READY)
        page.evaluate(options.do)
        time.sleep(0.3)
        options.out.write_bytes(page.screenshot())
        for complaint in page.complaints:
            print(complaint)


if __name__ == "__main__":
    main()
