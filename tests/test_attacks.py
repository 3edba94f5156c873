"""Programs that try to pass without solving anything, to get out, or to bring the machine down, grouped by trick.

Each is a string of its own in attacks_forging.py or attacks_harming.py, as a model would have written it. `f` is called with
2, 3 and 5 and ought to return the values of WANTED, which no attack knows. An attack fails if its status is any other than
"passed", comes in time and without an `error`: a program that breaks the sandbox would earn itself a place outside the
statistics.
All of this runs in a pid namespace of its own, so that a hole in the sandbox ends nothing else on the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewards import sandbox  # noqa: E402
from tests.attacks_forging import ENDINGS, EQUALITY, FORGERY, TAMPERING  # noqa: E402
from tests.attacks_harming import ESCAPES, HOST_FILE, RESOURCES, TEXTS  # noqa: E402

WANTED = {2: 48271, 3: [7, [11, "x"]], 5: "b9f1"}
HEADER = "import os, sys, time, ctypes, signal, threading\nfrom typing import *\nclass ListNode:\n    val = next = None\n"
TEST = "def check(candidate):\n" + "".join(f"    assert candidate(x={x}) == {value!r}\n" for x, value in WANTED.items())
ESCAPED = "def check(candidate):\n    assert candidate(x=2) == 'escaped'\n"  # what an attack that gets out returns
TIMEOUT = 0.5

GROUPS = {"equality": (EQUALITY, TEST), "endings": (ENDINGS, TEST), "forgery": (FORGERY, TEST), "tampering": (TAMPERING, TEST),
          "resources": (RESOURCES, TEST), "texts": (TEXTS, TEST), "escapes": (ESCAPES, ESCAPED)}

# What an answer may do: the guard is no use if it fails these.
HARMLESS = {
    "a child": "def f(x):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\n    return WANTED[x]",
    "a thread that recurses": """
        def f(x):
            found = []
            def deep(n): return deep(n - 1) if n else found.append(WANTED[x])
            sys.setrecursionlimit(10**5); threading.stack_size(1 << 26)
            thread = threading.Thread(target=deep, args=(20_000,)); thread.start(); thread.join()
            return found[0]
        """,
    "many threads, a few at a time": """
        def f(x):
            for _ in range(200):
                threads = [threading.Thread(target=int) for _ in range(3)]
                [thread.start() for thread in threads], [thread.join() for thread in threads]
            return WANTED[x]
        """,
    "a file": "def f(x):\n    open('a', 'w').write('b')\n    return WANTED[x] if open('a').read() == 'b' else 0",
    "output": "def f(x):\n    print('x' * 10**6)\n    return WANTED[x]",
    "late imports": "def f(x):\n    import decimal, sqlite3, unittest, asyncio, ctypes.util, zoneinfo\n    return WANTED[x]",
    "memory within its limit": "def f(x):\n    a = bytearray(150 << 20)\n    return WANTED[x]",
    "a main block and standard input": "def f(x): return WANTED[x]\nif __name__ == '__main__': assert sys.stdin.read() == ''",
}


def run_group(name: str) -> dict:
    """Run a group side by side; what became of each, and what is left. For `contained`."""
    programs, test = (HARMLESS, TEST) if name == "harmless" else GROUPS[name]
    given = f"WANTED = {WANTED!r}\n" if name == "harmless" else ""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("escaped")
        os.environ["SECRET"] = "escaped"
        tempfile.tempdir = folder
        sandbox.run("", "", TEST, "f")
        processes, files = _processes(), len(os.listdir("/proc/self/fd"))

        def run(number: int, text: str) -> tuple:
            text = textwrap.dedent(text).replace(HOST_FILE, str(secret)).replace("@NUMBER@", str(number % 2))
            begun = time.monotonic()
            result = sandbox.run(HEADER + given, text, test, "f", timeout=4 * TIMEOUT if given else TIMEOUT, memory_mb=256)
            return result.status, result.error, result.detail, time.monotonic() - begun

        if name == "escapes":  # two of the last, to meet
            programs = programs | {"meets another program (2)": programs["meets another program"]}
        with ThreadPoolExecutor(4) as pool:
            found = dict(zip(programs, pool.map(run, range(len(programs)), programs.values())))
        left = {"processes": sorted(_processes() - processes), "files": len(os.listdir("/proc/self/fd")) - files,
                "folder": os.listdir(folder), "secret": secret.read_text(), "threads": threading.active_count()}
    return {"found": found, "left": left}


def _processes() -> set[str]:
    return {pid for pid in os.listdir("/proc") if pid.isdigit()}


def contained(group: str) -> dict:
    outer = ["unshare", "-Urpf", "--kill-child", "--mount-proc"]
    if not all(sandbox.layers().values()):
        pytest.skip("needs every layer of the sandbox")
    done = subprocess.run([*outer, sys.executable, __file__, group], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_there_are_at_least_sixty():
    assert sum(len(programs) for programs, _ in GROUPS.values()) >= 60


@pytest.mark.parametrize("group", GROUPS)
def test_no_attack_passes_or_breaks_the_sandbox_or_leaves_anything(group):
    result = contained(group)
    for name, (status, error, detail, seconds) in result["found"].items():
        assert error is None, f"{name}: {error}"
        assert status not in (None, "passed"), f"{name}: {status} {detail}"
        assert status == "timeout" or seconds < 6, f"{name}: {status} after {seconds:.1f} s"
    assert result["left"] == {"processes": [], "files": 0, "folder": ["secret"], "secret": "escaped", "threads": 1}


def test_a_harmless_program_may_do_what_it_needs():
    result = contained("harmless")
    assert {name: status for name, (status, *_) in result["found"].items()} == dict.fromkeys(HARMLESS, "passed"), result


if __name__ == "__main__":
    print(json.dumps(run_group(sys.argv[1])))
