"""What runs inside the sandbox: a template that is started once, and for each program a checker and a candidate.

    template    has Python and the usual modules loaded; forks a checker per program and knows nothing else
    checker     trusted, process 1 of the program's own pid namespace: executes the header, forks the candidate, reads the
                test only then, and runs the test's `check` on a proxy of the candidate
    candidate   untrusted: parses, compiles and defines the answer, and answers calls

The candidate never holds an expected value, nor the channel on which the verdict travels. Results come back as plain
values (wire.py). Until the candidate executes the answer its word is good: it parses, so that a hostile text crashes,
starves or blocks nobody else.
"""

import ast
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import pickle
import random
import re
import resource
import select
import signal
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Callable

from rewards import confine, trees, wire
from rewards.proxy import OUT_OF_MEMORY, Proxy, Stop, describe, look

STARTUP_SECONDS = 30.0  # beyond this a candidate that has not begun is an infrastructure failure
FILE_BYTES = 16 << 20   # a program may write so much to a file
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)  # of a checker: a result too deep to hash, compare or free
PRELOADED = ("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator", "random", "re",
             "string", "threading", "typing")
QUIET = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)


# ---------------------------------------------------------------- the template


def template(control_fd: int, parent_fd: int, site: list[str]) -> None:
    """Fork a checker for each header that comes with a program's socket, until the other side has closed, or has died:
    `parent_fd` is a pidfd of it, or -1. Never returns."""
    sys.path += site
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # process 1 of a namespace ignores what it does not handle
    confine.read_only()
    confine.nproc_holds()  # this and what follows is kept: forks find it done
    confine.readable()
    for may_fork in (False, True):
        confine.seccomp_program(may_fork)
    load("\n".join(f"import {module}" for module in PRELOADED))
    if not hasattr(os, "pidfd_open"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control, poll = socket.socket(fileno=control_fd), select.poll()
    poll.register(control, select.POLLIN)
    if parent_fd >= 0:
        poll.register(parent_fd, select.POLLIN)
    control.sendall(b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    checkers: dict[int, tuple[int, int]] = {}  # pidfd -> pid, socket
    while True:
        for fd, _ in poll.poll():
            if fd in checkers:  # it ended: the other side sees its socket close when nothing of it is left
                pid, job_fd = checkers.pop(fd)
                ended = os.waitpid(pid, 0)[1]
                if os.WIFSIGNALED(ended) and os.WTERMSIG(ended) in CRASHES:
                    with contextlib.suppress(OSError):
                        wire.send(job_fd, json.dumps({"stage": "crashed"}).encode())
                poll.unregister(fd)
                os.close(fd)
                os.close(job_fd)
                continue
            size, received, *_ = socket.recv_fds(control, 8, 1) if fd == control_fd else (b"", [])
            if not size:
                os._exit(0)
            header = control.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL).decode("utf-8", "surrogatepass")
            load(header)
            pid = start_checker(received[0], header)
            if pid and hasattr(os, "pidfd_open"):
                done = os.pidfd_open(pid)
                checkers[done] = pid, received[0]
                poll.register(done, select.POLLIN)
            else:
                os.close(received[0])


def start_checker(job_fd: int, header: str) -> int:
    """The new process' id, 0 if there is none."""
    try:
        pid = confine.fork_as_init()
    except OSError as problem:
        wire.send(job_fd, json.dumps({"error": f"no process for the checker: {problem}"}).encode())
        return 0
    if pid == 0:
        checker(job_fd, header)
    return pid


@functools.lru_cache(maxsize=256)
def load(header: str) -> types.ModuleType | types.CodeType | BaseException:
    """What can be done with a header once and for all, so that forks find it done: import what it imports, compile it, and
    if it does nothing but import, define and assign, execute it."""
    for module in re.findall(r"^(?:from|import)[ \t]+([\w.]+)", header, re.MULTILINE):
        with contextlib.suppress(BaseException):  # executing the header will show it
            importlib.import_module(module)
    try:
        tree = ast.parse(header)
        code = compile(header, "<header>", "exec", dont_inherit=True)
        if not all(isinstance(statement, QUIET) for statement in tree.body):
            return code  # it may change more than its own names
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        random.seed(0)
        exec(code, main.__dict__)
        node_classes(main)
        return main
    except BaseException as problem:
        return problem
    finally:
        gc.collect()
        gc.freeze()  # what is here stays: no fork need look through it


@functools.lru_cache(maxsize=256)
def node_classes(main: types.ModuleType) -> dict[str, type]:
    """The header's own classes, whose instances travel between checker and candidate."""
    return {name: value for name, value in vars(main).items()
            if isinstance(value, type) and value.__module__ == "__main__" and value.__dictoffset__}


# ---------------------------------------------------------------- the checker


def checker(job_fd: int, header: str) -> None:
    """Judge one program; reports a frame when the answer is compiled and one with "status" or "error". Never returns."""
    def report(**what: object) -> None:
        with contextlib.suppress(OSError):  # if nobody listens any more
            wire.send(job_fd, json.dumps(what).encode())

    try:
        confine.die_with_parent()
        if not hasattr(os, "pidfd_open"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, job_fd)
        os.closerange(job_fd + 1, 4096)
        judge(job_fd, header, report)
    except BadRow as problem:
        report(error=str(problem))
    except BaseException:
        report(error=f"the checker broke: {traceback.format_exc(limit=-3)}")
    finally:
        os._exit(0)


def judge(job_fd: int, header: str, report: Callable) -> None:
    """Execute the header, fork the candidate, have it parse and compile the answer, run the test on it."""
    read = functools.partial(os.read, job_fd)
    job = json.loads(wire.receive(read))
    mounted = confine.private_mounts()
    job |= {"header": header, "folder": confine.FOLDER if mounted else job["folder"],
            "may_fork": (mounted and confine.limit_processes()) or confine.nproc_holds()}
    os.chdir(job["folder"])
    for kind, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        confine.limit(kind, value)
    random.seed(0)
    try:
        loaded = load(header)
        if isinstance(loaded, BaseException):
            raise loaded
        main = sys.modules["__main__"] = loaded if isinstance(loaded, types.ModuleType) else types.ModuleType("__main__")
        if main is not loaded:
            exec(loaded, main.__dict__)
    except BaseException as problem:
        raise BadRow(f"the row's header fails: {describe(problem)}") from None
    classes = node_classes(main)
    (call_read, call_write), (result_read, result_write) = os.pipe(), os.pipe()
    pid = confine.fork()
    if pid == 0:
        for fd in (job_fd, call_write, result_read):
            os.close(fd)
        candidate(call_read, result_write, classes, job)
    os.close(call_read)
    os.close(result_write)
    proxy = Proxy(pid, result_read, call_write, classes, job)
    confine.limit(resource.RLIMIT_AS, max(job["memory"], 1 << 30))
    confine.limit(resource.RLIMIT_CPU, math.ceil(job["timeout"]) + 2)  # for a result that keeps the checker busy
    test = json.loads(wire.receive(read))["test"]  # only now, when the candidate is a process of its own

    proxy.allow(STARTUP_SECONDS)
    known = {"layers": ["namespaces"] * mounted + proxy.result()}
    proxy.allow()  # for parsing and compiling together
    for status in ("syntax_error", "compile_error"):
        try:
            known |= proxy.result()
        except (Exception, Stop) as problem:
            return report(**known, status=status, detail=describe(problem))
    report(**known, stage="compiled")
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), main.__dict__)
        check = main.check
    except Exception as problem:
        raise BadRow(f"the row's test fails to load: {describe(problem)}") from None

    begun, started, detail = None, proxy.started(), ""
    try:
        proxy.allow()
        proxy.exchange("define")
        begun = proxy.cpu()
        check(proxy)
        status = "passed"
    except AssertionError as problem:  # of the test: the candidate's own arrive as Stop
        status, detail = "failed", describe(problem)
    except MemoryError as problem:
        status, detail = "memory", describe(problem)
    except (Exception, Stop, SystemExit) as problem:
        status, detail = "runtime_error", describe(problem)
    if proxy.stopped is not None:  # whatever the test made of it
        status, detail = proxy.stopped
    alone = proxy.started() == started  # else some of its time may have been spent where the clock does not see it
    proxy.end()
    seconds = max(proxy.cpu() - begun, 0.0) if begun is not None and alone else None
    report(status=status, detail=detail, cpu_seconds=seconds)


class BadRow(Exception):
    """Header or test cannot be used: says nothing about the answer."""


# ---------------------------------------------------------------- the candidate


def candidate(read_fd: int, write_fd: int, classes: dict[str, type], job: dict) -> None:
    """The untrusted process: parse, compile and define the answer, then answer calls until killed. Never returns."""
    read = functools.partial(os.read, read_fd)
    answer, space, tree, code, entry = job["answer"], sys.modules["__main__"].__dict__, [], [], []

    def parse() -> dict:
        tree.append(ast.parse(answer))
        return {"shape": trees.shape(tree[0]), "defines": trees.binds(tree[0], job["entry_point"])}

    def compile_all() -> dict:
        # Header, answer and test compile together exactly when they compile one by one: an answer that parses alone cannot
        # alter how another text parses. But for __future__, which has to stand first.
        if "__future__" in answer:
            compile(job["header"] + "\n" + answer, "<answer>", "exec", dont_inherit=True)
        code.append(compile(tree.pop(), "<answer>", "exec", dont_inherit=True))
        return {}

    def define() -> None:
        exec(code.pop(), space)
        entry.append(eval(job["entry_point"], space))

    def call() -> tuple:
        args, kwargs = wire.decode(data, classes)
        sent = [value for value in (*args, *kwargs.values()) if type(value) not in (int, str, float, bool, type(None))]
        before = wire.encode(sent, classes)
        value = entry[0](*args, **kwargs)
        return value, [args, kwargs] if wire.encode(sent, classes) != before else None

    def attempt(function: Callable) -> None:
        try:
            reply = "value", function()
        except BaseException as problem:
            reply = "raised", describe(problem).split(": ", 1)
        try:
            encoded = wire.encode(reply, classes)
        except (RecursionError, pickle.PicklingError):
            encoded = wire.encode(("value", (wire.Opaque(), None)), classes)
        wire.send(write_fd, encoded)

    try:
        attempt(lambda: shut_in(job))
        random.seed(0)  # the header may have drawn; an answer that draws gets the same verdict every time
        attempt(parse)
        attempt(compile_all)
        wire.receive(read)  # the test is loaded
        attempt(define)
        while True:
            data = wire.receive(read)
            attempt(call)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:
        os._exit(1)


def shut_in(job: dict) -> list[str]:
    """Give up every right that an answer has no use for; the names of the layers reached."""
    held = 0
    with contextlib.suppress(OSError):
        held = int(look("/proc/self/statm").split()[0]) * resource.getpagesize()
    confine.limit(resource.RLIMIT_AS, held + job["memory"])  # what was there before the answer is not its own
    confine.limit(resource.RLIMIT_CPU, math.ceil(3 * job["timeout"]) + 1)  # a backstop: the proxy looks more closely
    os.setsid()
    reached = {"candidate_namespace": confine.unshare(confine.NEWUSER), "no_new_privs": confine.no_new_privs()}
    confine.drop_capabilities()
    if confine.nproc_holds():  # counted in the user namespace, so not before there is one
        confine.limit(resource.RLIMIT_NPROC, confine.MAX_PROCESSES)
    reached["landlock"] = reached["no_new_privs"] and confine.landlock(job["folder"])
    reached["seccomp"] = reached["no_new_privs"] and confine.seccomp(job["may_fork"])
    confine.die_with_parent()  # last: a change of rights undoes it
    return [name for name, there in reached.items() if there]
