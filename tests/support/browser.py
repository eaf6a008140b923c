"""A headless browser for tests, controlled directly: Chromium with DevTools over two pipes, Firefox with Marionette
over a socket. Needs no driver program and no package, only the browser."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.waiting import until

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FIREFOX = ("firefox", "firefox-esr")
READY = "location.protocol === 'file:' && !!document.querySelector('html[data-ready]')"
KEYS = {"ArrowDown": "\ue015", "ArrowUp": "\ue013", "ArrowLeft": "\ue012", "ArrowRight": "\ue014",
        "Enter": "\ue007", "Escape": "\ue00c", "End": "\ue010", "Home": "\ue011", "PageDown": "\ue00f"}  # fmt: skip


def installed() -> list[str]:
    """The browsers on PATH, one of each kind, Chromium first."""
    found = []
    for names in (CHROMIUM, FIREFOX):
        found += [name for name in names if shutil.which(name)][:1]
    return found


def start(name: str) -> Browser:
    """Starts a browser that installed() lists."""
    return (Chromium if name in CHROMIUM else Firefox)(name)


class Browser:
    """One tab. `network` lists other resources that the page requested, `messages` its errors and warnings."""

    def __init__(self) -> None:
        self.network: list[str] = []
        self.messages: list[str] = []

    def open(self, path: Path, fragment: str = "") -> None:
        """Shows a file; loads it again even if only the fragment changes."""
        raise NotImplementedError

    def visit(self, url: str, ready: str) -> None:
        """Shows a page of a server; waits until the JavaScript expression `ready` is true in it."""
        raise NotImplementedError

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the page in pixels, and whether the system is said to be dark."""
        raise NotImplementedError

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        raise NotImplementedError

    def press(self, *keys: str) -> None:
        """Presses keys; names as in KeyboardEvent.key."""
        raise NotImplementedError

    def screenshot(self, path: Path) -> None:
        """Writes a PNG."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the browser."""
        raise NotImplementedError

    def wait(self, expression: str) -> Any:
        """Evaluates until the value is true; fails after a minute."""
        return until(lambda: self.evaluate(expression), lambda: f"{expression}\n{self.messages}")


class Chromium(Browser):
    """Speaks the DevTools protocol: JSON texts that end with a zero byte, to descriptor 3 and from descriptor 4."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._profile = tempfile.mkdtemp(prefix="browser-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                 "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--window-size=1400,860",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
                 "--hide-scrollbars", f"--user-data-dir={self._profile}"]  # fmt: skip
        # the browser expects its pipes at 3 and 4: an interpreter moves them there and then executes the browser
        command = (
            "import os, sys; a, b = (os.dup(os.dup(int(n))) for n in sys.argv[1:3]); "
            "c = os.dup(b); os.dup2(a, 3); os.dup2(c, 4); os.execvp(sys.argv[3], sys.argv[3:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", command, str(theirs_in), str(theirs_out), name, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._call(f"{domain}.enable")
            self._call("Emulation.setDeviceMetricsOverride", width=1400, height=860, deviceScaleFactor=1,
                       mobile=False)  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 60)
            block = os.read(self._from, 1 << 20) if ready else b""
            assert block, "the browser does not answer"
            self._rest += block
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._to, text) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._event(answer.get("method", ""), answer.get("params", {}))

    def _event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.network.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.messages.append(f"dialog: {params['message']}")
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path, fragment: str = "") -> None:
        self._call("Page.navigate", url="about:blank")
        self.network.clear()
        self.messages.clear()
        self._loaded = False
        url = f"{path.resolve().as_uri()}#{fragment}"
        self._call("Page.navigate", url=url)
        while not self._loaded:
            message = self._read()
            self._event(message.get("method", ""), message.get("params", {}))
        self.wait(READY)
        self.network.remove(path.resolve().as_uri())

    def visit(self, url: str, ready: str) -> None:
        self._call("Page.navigate", url="about:blank")
        self.network.clear()
        self.messages.clear()
        self._call("Page.navigate", url=url)
        self.wait(f"location.protocol !== 'about:' && document.readyState === 'complete' && ({ready})")

    def look(self, width: int, height: int, dark: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                   mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Chooses files for the <input type=file> that the CSS selector finds."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(path.resolve()) for path in paths])

    def evaluate(self, expression: str) -> Any:
        result = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", key=key, **text)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)


class Firefox(Browser):
    """Speaks the Marionette protocol: `LENGTH:JSON` of [type, id, error, result] over a local socket."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._profile = tempfile.mkdtemp(prefix="browser-")
        Path(self._profile, "user.js").write_text(
            'user_pref("marionette.port", 0);\nuser_pref("app.update.enabled", false);\n'
            'user_pref("browser.shell.checkDefaultBrowser", false);\nuser_pref("network.captive-portal-service.enabled", false);\n'
        )
        self._process = subprocess.Popen(
            [name, "--headless", "--marionette", "--profile", self._profile, "--no-remote", "--window-size", "1400,860"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "MOZ_HEADLESS": "1"},
        )  # fmt: skip
        self._socket: socket.socket | None = None
        self._number = 0
        self._rest = b""
        try:
            self._socket = socket.create_connection(("127.0.0.1", self._port()), 60)
            self._read()
            self._call("WebDriver:NewSession", capabilities={"alwaysMatch": {}})
            self._call("WebDriver:SetWindowRect", x=0, y=0, width=1400, height=1000)
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        file = Path(self._profile, "MarionetteActivePort")

        def told() -> bool:
            assert self._process.poll() is None, "Firefox did not start"
            return file.exists() and re.fullmatch(r"\d+", file.read_text()) is not None

        until(told, "Firefox says its port")
        return int(file.read_text())

    def _read(self) -> Any:
        assert self._socket is not None
        while b":" not in self._rest:
            self._rest += self._some()
        size, _, self._rest = self._rest.partition(b":")
        while len(self._rest) < int(size):
            self._rest += self._some()
        text, self._rest = self._rest[: int(size)], self._rest[int(size) :]
        return json.loads(text)

    def _some(self) -> bytes:
        assert self._socket is not None
        block = self._socket.recv(1 << 20)
        assert block, "the browser does not answer"
        return block

    def _call(self, method: str, **params: Any) -> Any:
        assert self._socket is not None
        self._number += 1
        text = json.dumps([0, self._number, method, params]).encode()
        self._socket.sendall(b"%d:%s" % (len(text), text))
        _, number, error, result = self._read()
        assert number == self._number and error is None, f"{method}: {error}"
        return result

    def open(self, path: Path, fragment: str = "") -> None:
        self._call("WebDriver:Navigate", url="about:blank")
        self._call("WebDriver:Navigate", url=f"{path.resolve().as_uri()}#{fragment}")
        self.wait(READY)
        loaded = "performance.getEntriesByType('resource').map(entry => entry.name)"
        self.network = self.evaluate(loaded)

    def evaluate(self, expression: str) -> Any:
        return self._call("WebDriver:ExecuteScript", script=f"return ({expression})", args=[])["value"]

    def press(self, *keys: str) -> None:
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._call("WebDriver:PerformActions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def screenshot(self, path: Path) -> None:
        shot = self._call("WebDriver:TakeScreenshot", full=False)["value"]
        path.write_bytes(base64.b64decode(shot))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._profile, ignore_errors=True)
