"""Headless Chromium driven over its own debugging protocol."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One page of a headless browser."""

    def __init__(self, executable: str, profile: Path, *, width: int = 1000, height: int = 900) -> None:
        command = [executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions", "about:blank"]
        command += [f"--window-size={width},{height}", "--hide-scrollbars"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        lines = itertools.takewhile(bool, iter(self._process.stderr.readline, ""))
        address = next(m.group(1) for line in lines if (m := re.search(r"listening on (ws://\S+)", line)))
        self._socket = connect(address, max_size=None)
        self._ids = itertools.count(1)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; faults of the page that arrive meanwhile are kept in `errors`."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"])[:500])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Loads a page."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str, limit_s: float = 60) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + limit_s
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} did not become true; errors: {self.errors}"
            time.sleep(0.1)

    def set_theme(self, name: str) -> None:
        """`light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Ends the browser."""
        self._socket.close()
        self._process.kill()
        self._process.wait(30)
