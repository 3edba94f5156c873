"""Runs an untrusted answer against a trusted test, and says what happened. This is the caller's side; see inside.py.

    caller --- header, answer, test ---> checker --- arguments ---> candidate
           <------- verdict -----------          <---- results ----

A template process is started once and forks a checker for each program, which costs a fraction of a new interpreter.
Layers (`layers()`): a clean interpreter with an empty environment; limits; user, pid, network, ipc and mount namespaces by
util-linux' `unshare`, and for each program a pid namespace, a /proc and a folder in memory of its own, so that nothing
outlives it, all other files being read-only; a user namespace of the candidate's own, so that it has no rights over the
checker; no_new_privs; Landlock, so that it reads the Python library, reads and writes its folder, and nothing else; seccomp,
against memory that no limit counts, sockets, and changing the limits or priorities of others. What is missing on a machine is
logged once, and mode "strict" refuses to run there.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards import wire
from rewards.inside import STARTUP_SECONDS
from rewards.proxy import GRACE, HARD_FACTOR

LAYERS = ("interpreter", "limits", "namespaces", "candidate_namespace", "no_new_privs", "landlock", "seccomp")

_START = ("import sys; sys.path.insert(0, sys.argv[1]); from rewards import inside; del sys.path[0]; "
          "inside.template(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])")

log = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """Mode "strict", and a layer is missing; or the sandbox broke."""


@dataclass
class Result:
    """`status`: passed, failed, runtime_error, timeout, memory, compile_error, syntax_error; None if `error` is set.

    `error` says what broke on OUR side, or in header or test; such a run says nothing about the answer."""

    status: str | None = None
    defines: bool = False             # the answer parses and binds the entry point's name at its top level
    shape: str | None = None          # `trees.shape` of the answer, if it parses
    cpu_seconds: float | None = None  # CPU time while the test ran; None if it did not begin or the answer started processes
    detail: str = ""                  # for people: what was raised, or how the process ended
    error: str | None = None
    layers: Sequence[str] = ()


def run(header: str, answer: str, test: str, entry_point: str, *, timeout: float = 5.0, memory_mb: int = 1024,
        mode: str = "auto") -> Result:
    """Check one answer. Callable from any thread; whatever the answer started is gone when it returns.

    timeout: seconds of CPU, and also of wall time not spent waiting for a core. memory_mb: beyond the bare interpreter's."""
    require(mode)
    return _run(header, answer, test, entry_point, timeout, memory_mb, layers()["namespaces"])


def require(mode: str) -> None:
    """Raise SandboxError if mode is "strict" and a layer is missing; ValueError for an unknown mode."""
    if mode not in ("auto", "strict"):
        raise ValueError(f'sandbox mode {mode!r}: use "auto" or "strict"')
    missing = [name for name, there in layers().items() if not there]
    if mode == "strict" and missing:
        raise SandboxError(f"sandbox layers missing here: {', '.join(missing)}")


@functools.cache
def layers() -> dict[str, bool]:
    """Which layers are in force on this machine, found out by running a harmless program; logged once."""
    probe = _run("", "def f(): return 1", "def check(f): assert f() == 1", "f", 5.0, 1024, False)
    reached = {"interpreter", "limits", *probe.layers} if probe.status == "passed" else ()
    found = {name: name in reached for name in LAYERS}
    if all(found.values()):
        log.info("sandbox layers: %s", ", ".join(LAYERS))
    else:
        log.warning("sandbox layers MISSING: %s. Untrusted programs are less confined here. In force: %s. %s",
                    ", ".join(name for name in found if not found[name]),
                    ", ".join(name for name in found if found[name]) or "none", probe.error or "")
    return found


def close() -> None:
    """End the template process. The next run starts another."""
    global _template
    with _lock:
        template, _template = _template, None
    if template is not None:
        template.close()


def _run(header: str, answer: str, test: str, entry_point: str, timeout: float, memory_mb: int, own_folder: bool) -> Result:
    """Try twice: a template that died, of a machine short of memory, say, took innocent programs with it."""
    job = {"answer": answer, "entry_point": entry_point, "timeout": timeout, "memory": memory_mb << 20}
    for last in (False, True):
        try:
            if own_folder:
                return _attempt(header, job, test)
            with tempfile.TemporaryDirectory(prefix="corrgrpo-", ignore_cleanup_errors=True) as folder:
                return _attempt(header, job | {"folder": folder}, test)
        except (OSError, EOFError, SandboxError) as failure:
            if last:
                return Result(error=f"sandbox: {type(failure).__name__}: {failure}")


def _attempt(header: str, job: dict, test: str) -> Result:
    result, template = Result(), _current()
    deadline = time.monotonic() + STARTUP_SECONDS + (3 * HARD_FACTOR + 1) * (job["timeout"] + GRACE)
    with template.job(header) as channel:
        channel.settimeout(STARTUP_SECONDS)
        for part in (job, {"test": test}):
            channel.sendall(wire.frame(json.dumps(part).encode()))
        begun = None

        def read(size: int) -> bytes:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            return channel.recv(size)

        try:
            while result.status is None and result.error is None:
                for name, value in json.loads(wire.receive(read)).items():
                    if name != "stage":
                        setattr(result, name, value)
                    elif value == "crashed":
                        if begun is None:
                            raise EOFError("the checker crashed")
                        result.status, result.detail = "runtime_error", "the result crashed the checker"
                    elif value == "compiled":
                        begun = time.monotonic()
            with contextlib.suppress(EOFError, OSError):
                wire.receive(read)  # nothing follows: its socket closes when it is gone
        except TimeoutError:
            template.close()
            raise SandboxError("the checker is stuck") from None
        except EOFError:
            # It ends without a word when it is killed: for too much CPU time, if a result kept it busy
            if begun is None or time.monotonic() - begun < job["timeout"]:
                raise
            result.status, result.detail = "timeout", "comparing the results takes too long"
    return result


# ---------------------------------------------------------------- the template


class _Template:
    """A running template process and the socket on which it takes jobs. It ends when that closes or this process dies."""

    def __init__(self):
        self.owner, self._lock = os.getpid(), threading.Lock()
        self._control, theirs = socket.socketpair()
        me = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else -1
        passed = [fd for fd in (theirs.fileno(), me) if fd >= 0]
        site = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        # these flags and an otherwise empty environment are -I with a fixed hash seed: sets iterate alike in every run
        command = [*namespaces(), sys.executable, "-P", "-s", "-S", "-B", "-c", _START, str(Path(__file__).parents[1]),
                   str(theirs.fileno()), str(me), *site]
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.PIPE, cwd="/", env=environment, pass_fds=passed,
                                             start_new_session=True)
        finally:
            theirs.close()
            if me >= 0:
                os.close(me)
        with self._process.stderr as errors:
            self._control.settimeout(STARTUP_SECONDS)
            if self._control.recv(6) != b"ready\n":
                self.close()
                raise SandboxError(f"no template: {errors.read().decode(errors='replace')[-500:].strip()}")
            self._control.settimeout(None)

    def job(self, header: str) -> socket.socket:
        """The socket of a new checker."""
        ours, theirs = socket.socketpair()
        data = header.encode("utf-8", "surrogatepass")
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [len(data).to_bytes(8, "big")], [theirs.fileno()])
                self._control.sendall(data)
            except OSError:
                ours.close()
                raise
        return ours

    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        if self.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()


_template: _Template | None = None
_lock = threading.Lock()
atexit.register(close)


def _current() -> _Template:
    """The template of this process: a new one if there is none, or it died, or belongs to the process that forked us."""
    global _template
    with _lock:
        if _template is None or not _template.alive():
            if _template is not None:
                _template.close()
            _template = None
            _template = _Template()
        return _template


@functools.cache
def namespaces() -> tuple[str, ...]:
    """The `unshare` command line, empty where it does not work."""
    program = shutil.which("unshare") or "unshare"
    for user in (("--user", "--map-root-user"), ()):  # root needs no user namespace where there is none
        command = (program, *user, "--pid", "--fork", "--kill-child", "--net", "--ipc", "--mount-proc")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*command, sys.executable, "-S", "-c", ""], stdin=subprocess.DEVNULL, capture_output=True,
                           timeout=10, check=True)
            return command
    return ()
