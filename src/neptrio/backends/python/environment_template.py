"""Templates of environments: the instances of models with one EXECUTION_ENV_PATH are forked from one process of its
interpreter, as those of other models are from the server's (template.py).

Rules:
 1. A template serves the processes that would be started with the same interpreter, the same installed packages and the same
    variables. The number of threads of numerical libraries may differ: each process sets its own.
 2. The process of a model with a user of its own (RUN_AS_UID) is never forked: what an environment brings runs as that user
    from its first instruction.
 3. An environment whose interpreter cannot be forked from says so when its template is started, and its processes are started
    one by one: it runs threads by itself (sitecustomize, a .pth file), its numpy has libraries whose threads are counted before
    a model's variables are known (MKL, OpenMP), or bin/python starts the interpreter as a process of its own. It is tried once,
    unless a signal has ended it before it could say anything.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import triton_python_backend_utils as utils
from neptrio.backends.python.environment import variables
from neptrio.backends.python.limits import THREADS
from neptrio.backends.python.template import ONE_THREAD, SUPPORTED, Template, Unusable
from neptrio.foreign import summary, text_of

PACKAGE = Path(utils.__file__).parent
# makes the server's utilities the environment's, of which it needs no other part
FIND_UTILITIES = """
import sys, importlib.util as u
sys.path[:1] = [] if sys.path[:1] == [""] else sys.path[:1]
s = u.spec_from_file_location("triton_python_backend_utils", sys.argv[1] + "/__init__.py",
                              submodule_search_locations=[sys.argv[1]])
m = u.module_from_spec(s)
sys.modules[s.name] = m
try:
    s.loader.exec_module(m)
except ModuleNotFoundError as e:
    if e.name != "numpy":
        raise
    sys.exit("%s (the model runs with %s, which needs it: %s -m pip install numpy)" % (e, sys.executable, sys.executable))
"""
BOOTSTRAP = f"""{FIND_UTILITIES}
from triton_python_backend_utils._process.template import main_of_environment
main_of_environment(int(sys.argv[3]), int(sys.argv[2]))
"""
PACKAGES = "lib*/python3*/site-packages"
READ_ONCE = (
    *("bin/python", "pyvenv.cfg", PACKAGES),
    *(f"{PACKAGES}/{file}" for file in ("*.pth", "sitecustomize.py", "usercustomize.py")),
)
ENDS_SECONDS = 2.0  # for a process whose socket is closed
MOST = 64  # environments that are remembered


class EnvironmentTemplate(Template):
    """A process of an environment's interpreter that has imported its numpy."""

    rings = "plain"
    output = subprocess.DEVNULL  # an environment that is broken says so in the process of a model, too

    def __init__(self, python: str, environ: dict[str, str]) -> None:
        """`environ`: the variables that it is started with."""
        super().__init__()
        self._python = python
        self._environ = environ
        self.unusable = ""  # why: rule 3

    def _program(self) -> tuple[list[str], dict[str, str]]:
        program = [self._python, "-u", "-c", BOOTSTRAP, str(PACKAGE), str(os.getpid())]
        return program, {**self._environ, **dict.fromkeys(ONE_THREAD, "1")}

    def _start(self) -> None:
        if self.unusable:  # as has been found since this one asked for it
            raise Unusable(self.unusable)
        super()._start()

    def _end(self) -> None:
        super()._end()
        if (
            self._starter is not None
        ):  # environments come and go, and no template of a model is forked from this one
            self._starts.put(None)
            self._starter = None

    def _started(self, sock: socket.socket) -> None:
        try:
            said = sock.recv(1 << 16)
            if not said and self._killed():
                raise ConnectionResetError("the template was killed")
            why = json.loads(said or b'{"error": "its interpreter has ended"}')["error"]
        except ConnectionResetError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = summary(error)
        if why is not None:
            self.unusable = f"'{self._python}' cannot be forked from: {text_of(why)}"
            raise Unusable(self.unusable)

    def _killed(self) -> bool:
        """Whether it has ended by a signal, from outside or for want of memory, which says nothing of the environment."""
        try:
            return self._running is not None and self._running.wait(ENDS_SECONDS) < 0
        except subprocess.TimeoutExpired:  # it has closed its socket, and lives
            return False


class EnvironmentTemplates:
    """Those of a process. Any thread."""

    def __init__(self) -> None:
        self._known: dict[Any, EnvironmentTemplate] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Called in a process that was forked (rule 6 of template.py)."""
        self._lock = threading.Lock()
        for known in self._known.values():
            known.begin_anew()
        self._known = {}

    def find(
        self, python: str, environ: dict[str, str], limits: dict[str, Any]
    ) -> EnvironmentTemplate | None:
        """The template for a process of the interpreter `python` with these variables and limits, None if there is none."""
        if not SUPPORTED or limits.get("user"):
            return None
        given = {name: value for name, value in variables(python, environ).items() if name not in THREADS}
        key = (python, _installed(python), frozenset(given.items()))
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                found = EnvironmentTemplate(python, given)
                if len(self._known) >= MOST:
                    del self._known[next(iter(self._known))]  # it ends with the last of its processes
            self._known[key] = found
        return None if found.unusable else found


def _installed(python: str) -> tuple[tuple[str, int, int, int], ...]:
    """Changes when the interpreter or the packages beside it do, for which an installer makes folders there, and when the
    interpreter would find others: it reads where to look once, at its start."""
    root = os.path.dirname(os.path.dirname(python))
    found = []
    for pattern in READ_ONCE:
        for place in sorted(glob.glob(f"{glob.escape(root)}/{pattern}")):
            try:
                status = os.stat(place)
            except OSError:
                continue
            found.append((place, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


environment_templates = EnvironmentTemplates()
os.register_at_fork(after_in_child=environment_templates.begin_anew)
