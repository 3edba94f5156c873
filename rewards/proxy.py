"""How the checker watches a candidate (inside.py): a callable that the test takes for the answer."""

import builtins
import contextlib
import os
import re
import resource
import select
import signal
import sys
import time

from rewards import wire

TICK = 0.01             # seconds between two looks at a candidate that is busy
GRACE = 0.5             # seconds that a program may sleep beyond `timeout`
HARD_FACTOR = 20.0      # no program is given more than so many times `timeout`, however busy the machine is
MAX_PROCESSES = 64      # of a program; the kernel's own limit is further away (confine.py)
MAX_MESSAGE = 32 << 20  # bytes of one call or result
OUT_OF_MEMORY = 77      # the candidate's exit status when it cannot even say so


class Stop(BaseException):
    """The candidate ended, or must; not an Exception, so that a test's own `except Exception` does not hide it."""


class Proxy:
    """What the test calls: sends the arguments to the candidate and returns, or raises, what comes back.

    `timeout` bounds the CPU time of the candidate, that of all its processes together, and also its wall time, less what it
    and the checker waited for a core: a program that sleeps ends after `timeout` and a little, one on a busy machine has the
    seconds it was promised.
    """

    def __init__(self, pid: int, read_fd: int, write_fd: int, classes: dict[str, type], job: dict):
        self._pid, self._read_fd, self._write_fd, self._classes = pid, read_fd, write_fd, classes
        self._timeout, self._memory = job["timeout"], job["memory"]
        self._reaped, self._last_cpu, self._watched, self._buffer = None, 0.0, 0.0, bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(read_fd, select.POLLIN)
        self._writable.register(write_fd, select.POLLOUT)
        os.set_blocking(write_fd, False)
        self.stopped: tuple[str, str] | None = None

    def __call__(self, *args, **kwargs):
        arguments = [list(args), kwargs]
        value, changed = self.exchange(arguments)
        if changed is not None:
            wire.update(arguments, changed, self._classes)
        return value

    def allow(self, seconds: float | None = None) -> None:
        """Start the clocks."""
        self._limit = self._timeout if seconds is None else seconds
        self._begun, self._begun_cpu = time.monotonic(), self.cpu()
        self._deadline = self._begun + self._limit + GRACE

    def cpu(self) -> float:
        """CPU seconds of the candidate so far, by the kernel's per-process clock; elsewhere known only at the end."""
        if self._reaped is None and sys.platform == "linux":
            self._last_cpu = time.clock_gettime((~self._pid << 3) | 2)
        return self._last_cpu

    def started(self) -> int:
        """How many processes and threads this pid namespace has seen."""
        if os.getpid() != 1:
            return 0
        return int(look("/proc/loadavg").split()[-1])

    def end(self) -> int:
        """Kill and reap the candidate and all its descendants; returns its wait status."""
        if self._reaped is None:
            self.cpu()  # the last reading
            for kill, target in ((os.kill, -1 if os.getpid() == 1 else self._pid), (os.killpg, self._pid)):
                with contextlib.suppress(OSError):
                    kill(target, signal.SIGKILL)
            self._reaped = os.waitpid(self._pid, 0)[1]
            with contextlib.suppress(ChildProcessError):
                while os.getpid() == 1:
                    os.waitpid(-1, 0)
            if sys.platform != "linux":
                usage = resource.getrusage(resource.RUSAGE_CHILDREN)
                self._last_cpu = usage.ru_utime + usage.ru_stime
        return self._reaped

    def exchange(self, message: object) -> object:
        if self.stopped:
            raise Stop(self.stopped[1])
        view = memoryview(wire.frame(wire.encode(message, self._classes)))
        while view:
            try:
                view = view[os.write(self._write_fd, view):]
            except BlockingIOError:
                self._wait(self._writable)
            except OSError:
                raise self._ended() from None
        return self.result()

    def result(self) -> object:
        """What the candidate says next. An exception that a test may expect is raised; everything else is a Stop."""
        size = int.from_bytes(self._read(8), "big")
        if size > MAX_MESSAGE:
            raise self._stop("memory", "the result is too large")
        data = self._read(size)
        try:
            kind, value = wire.decode(data, self._classes)
            if kind == "value":
                return value
            name, text = str(value[0])[:100], str(value[-1])[:200]
            error_type = getattr(builtins, name, None)
        except MemoryError:
            raise self._stop("memory", "the result is too large") from None
        except Exception as problem:
            raise self._stop("runtime_error", f"unreadable result: {describe(problem)}") from None
        if name == "MemoryError":
            raise self._stop("memory", text)
        if name != "AssertionError" and isinstance(error_type, type) and issubclass(error_type, Exception):
            try:
                error = error_type(text)
            except TypeError:
                error = Exception(text)
            raise error
        raise self._stop("runtime_error", f"{name}: {text}")

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._wait(self._readable)
            chunk = os.read(self._read_fd, 1 << 16 if len(self._buffer) < 1 << 16 else 1 << 20)
            if not chunk:
                raise self._ended()
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _wait(self, poll: select.poll) -> None:
        """Until the pipe is ready, as long as the candidate keeps within its limits."""
        while True:
            ready, now = poll.poll(1000 * TICK), time.monotonic()
            if self.cpu() - self._begun_cpu >= self._limit or (now >= self._deadline and self._late(now)):
                raise self._stop("timeout", "out of time")
            if now >= self._watched + TICK:
                self._watch()
                self._watched = now
            if ready:
                return

    def _late(self, now: float) -> bool:
        """Whether the time is up, counted without what was spent in the checker or waiting for a core."""
        self._deadline = self._begun + min(self._limit + GRACE + self._busy_elsewhere(), self._limit * HARD_FACTOR + GRACE)
        return now >= self._deadline

    def _busy_elsewhere(self) -> float:
        """Seconds that candidate and checker have ever waited for a core, and the checker's own CPU time."""
        waited = 0
        for pid in (self._pid, "self"):
            with contextlib.suppress(OSError, IndexError):
                waited += int(look(f"/proc/{pid}/schedstat").split()[1])
        return waited / 1e9 + time.process_time()

    def _watch(self) -> None:
        """rlimits count by process: end a program that has too many, or whose processes use too much together."""
        if self.started() <= self._pid:
            return
        pids, kilobytes, ticks = [name for name in os.listdir("/proc") if name.isdigit()], 0, 0
        if len(pids) > MAX_PROCESSES:  # they crowd out this process: no time to lose
            raise self._stop("runtime_error", "too many processes")
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just ended
                status = look(f"/proc/{pid}/status")
                kilobytes += sum(map(int, re.findall(rb"Rss(?:Anon|Shmem):\s+(\d+)", status)))
                if pid != "1":  # user and system time, its own and that of children it has reaped
                    ticks += sum(map(int, look(f"/proc/{pid}/stat").rpartition(b")")[2].split()[11:15]))
        if kilobytes << 10 > self._memory:
            raise self._stop("memory", "out of memory, all processes together")
        if ticks / os.sysconf("SC_CLK_TCK") - self._begun_cpu >= self._limit:
            raise self._stop("timeout", "out of time, all processes together")

    def _stop(self, status: str, detail: str) -> Stop:
        self.stopped = self.stopped or (status, detail)
        self.end()
        return Stop(detail)

    def _ended(self) -> Stop:
        status = self.end()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == OUT_OF_MEMORY:
            return self._stop("memory", "out of memory")
        return self._stop("runtime_error", f"the program ended early (wait status {status})")


def look(path: str) -> bytes:
    """The text of a small file of /proc."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def describe(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"[:200]
    except Exception:
        return f"{type(problem).__name__}: "
