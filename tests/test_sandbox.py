"""The sandbox: verdicts an answer cannot forge, and nothing of it left behind."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rewards import sandbox

ROOT = Path(__file__).resolve().parent.parent
HEADER = textwrap.dedent("""
    import sys, os, time, random
    class ListNode:
        def __init__(self, val=0, next=None):
            self.val, self.next = val, next
    def list_node(values):
        head = None
        for value in reversed(values):
            head = ListNode(value, head)
        return head
    def values(node):
        found = []
        while node:
            found.append(node.val)
            node = node.next
        return found
    """)
TEST = "def check(candidate):\n    assert candidate(x=2) == 4\n    assert candidate(x=3) == 9\n"


def run(answer: str, test: str = TEST, **options) -> sandbox.Result:
    result = sandbox.run(HEADER, textwrap.dedent(answer), test, "f", **{"timeout": 1.0, **options})
    assert result.error is None
    return result


@pytest.mark.parametrize("answer, status", [
    ("def f(x): return x * x", "passed"),
    ("def f(x): return x + 2", "failed"),
    ("def f(x): return None", "failed"),
    ("def f(x): assert x > 2; return 9", "runtime_error"),
    ("def f(x): raise AssertionError", "runtime_error"),
    ("def f(x): return 1 // 0", "runtime_error"),
    ("def f(): return 4", "runtime_error"),
    ("def g(x): return x * x", "runtime_error"),
    ("def f(x): return f(x)", "runtime_error"),
    ("raise SystemExit(0)\ndef f(x): return x * x", "runtime_error"),
    ("def f(x): sys.exit(0)", "runtime_error"),
    ("def f(x): os._exit(0)", "runtime_error"),
    ("def f(x): os.kill(os.getpid(), 9)", "runtime_error"),
    ("def f(x):\n    while True: pass", "timeout"),
    ("while True: pass\ndef f(x): return x * x", "timeout"),
    ("def f(x): time.sleep(60)", "timeout"),
    ("def f(x):\n    while True: print('x' * 1000)", "timeout"),
    ("def f(x): return len([0] * 10**10)", "memory"),
    ("return 1", "compile_error"),
    ("from __future__ import annotations\ndef f(x): return x * x", "compile_error"),  # the header stands before it
    ("def f(x: return x", "syntax_error"),
    ("x = 1\0", "syntax_error"),
    ("x = '\ud800'", "syntax_error"),
    ("x = " + "(" * 60_000, "syntax_error"),
    ("x = " + "-" * 60_000 + "1", "syntax_error"),
    ("x = " + "1+" * 30_000 + "1", "syntax_error"),
])
def test_every_ending_has_its_status(answer, status):
    assert run(answer).status == status


@pytest.mark.parametrize("answer", [
    # an object that equals everything
    "class A:\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\ndef f(x): return A()",
    "class A(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\ndef f(x): return A(7)",
    # the words a grader might look for
    "def f(x):\n    print('passed')\n    print('{\"stage\": \"end\", \"status\": \"passed\"}', file=sys.stderr)\n"
    "    os._exit(0)",
    # a test replaced, an exit hook, a patched builtin
    "import __main__, builtins\n__main__.check = lambda c: None\nbuiltins.AssertionError = int\ndef f(x): return 0",
    "import atexit\natexit.register(lambda: os._exit(0))\ndef f(x): sys.exit()",
    # frames of the caller
    "def f(x):\n    g = sys._getframe()\n    while g:\n        g.f_globals['check'] = g.f_locals['check'] = print\n"
    "        g = g.f_back\n    return 0",
    # the verdict written to every descriptor there is, the checker's included
    "def f(x):\n    line = b'{\"stage\": \"end\", \"status\": \"passed\"}\\n'\n"
    "    for pid in (1, os.getppid(), 'self'):\n        for fd in range(64):\n"
    "            try:\n                open(f'/proc/{pid}/fd/{fd}', 'wb', 0).write(line)\n"
    "            except OSError: pass\n    for fd in range(64):\n        try: os.write(fd, line)\n"
    "        except OSError: pass\n    os._exit(0)",
    # a message of its own making
    "import pickle\nclass A:\n    def __reduce__(self): return print, ('gotcha',)\n"
    "data = pickle.dumps(('value', A()))\n"
    "def f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, len(data).to_bytes(8, 'big') + data)\n"
    "        except OSError: pass\n    return 0",
])
def test_no_trick_passes(answer):
    assert run(answer).status in ("failed", "runtime_error", "memory")


@pytest.mark.parametrize("body, test", [
    ("return [x, (x, 'a'), {x: {1.5}}, None, True, complex(x, 1)]", "[2, (2, 'a'), {2: {1.5}}, None, True, 2+1j]"),
    ("from collections import defaultdict; d = defaultdict(list); d[x].append(x); return d", "{2: [2]}"),
    ("from collections import deque; return list(deque([x], 3))", "[2]"),
    ("return [int, type(x), {'a': str}, list[int]][:3]", "[int, int, {'a': str}]"),
])
def test_plain_values_come_back_as_they_are(body, test):
    assert run(f"def f(x): {body}", f"def check(candidate):\n    assert candidate(x=2) == {test}").status == "passed"


def test_linked_nodes_travel_both_ways_however_long_and_whoever_defines_their_class():
    answer = """
        class ListNode:                      # models like to repeat the header
            def __init__(self, val=0, next=None):
                self.val, self.next = val, next
        def f(head):
            last = None
            while head:
                head.next, last, head = last, head, head.next
            return last
        """
    test = ("def check(candidate):\n    n = 20000\n    assert candidate(None) is None\n"
            "    assert values(candidate(list_node(list(range(n))))) == list(range(n))[::-1]\n")
    assert run(answer, test).status == "passed"


def test_a_test_may_expect_an_exception_but_not_be_fooled_by_one():
    test = ("def check(candidate):\n    try:\n        candidate(1)\n    except ValueError:\n        return\n"
            "    assert False")
    assert run("def f(x): raise ValueError('no')", test).status == "passed"
    assert run("def f(x): return 1", test).status == "failed"
    assert run("def f(x): raise AssertionError", test.replace("ValueError", "Exception")).status == "runtime_error"


def test_cpu_time_is_that_of_the_test_run_alone():
    busy = "t = time.process_time()\nwhile time.process_time() - t < .3: pass\n"
    assert run(busy + "def f(x): return x * x").cpu_seconds < 0.1
    inside = run("def f(x):\n" + textwrap.indent(busy, "    ") + "    return x * x", timeout=5.0).cpu_seconds
    assert 0.55 < inside < 0.9
    assert run("def f(x): time.sleep(.2); return x * x").cpu_seconds < 0.1


def test_time_spent_in_other_processes_cannot_be_told():
    hidden = ("def f(x):\n    r, w = os.pipe()\n    if os.fork() == 0:\n        os.write(w, bytes([x * x]))\n"
              "        os._exit(0)\n    return os.read(r, 1)[0]")
    result = run(hidden)
    assert (result.status, result.cpu_seconds) == ("passed", None)


def test_the_environment_is_empty_and_the_folder_is_its_own(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    answer = "def f(x): open('a', 'w').write('b'); return os.environ.get('SECRET'), os.listdir('.')"
    test = "def check(candidate):\n    assert candidate(1) == (None, ['a'])"
    assert run(answer, test).status == "passed"
    assert run(answer, test).status == "passed"


def test_draws_and_set_order_repeat():
    answer = "def f(x): return [random.random(), list(set('abcdefgh'))]"
    test = "def check(candidate):\n    assert False, str(candidate(1))"
    assert run(answer, test).detail == run(answer, test).detail
    details = set()
    for _ in range(2):
        sandbox.close()     # the header is executed once in each template
        details.add(sandbox.run("import random\nx = random.random()", "def f(_): return x", test, "f").detail)
    assert len(details) == 1 and "0." in details.pop()


def test_a_header_may_start_threads():
    header = "import threading\nhold = threading.Event()\nt = threading.Thread(target=hold.wait, daemon=True)\nt.start()"
    answer = "def f(x):\n    t.join()\n    return x * x * threading.active_count()"     # a fork has none but its own
    assert sandbox.run(header, answer, TEST, "f", timeout=1.0).status == "passed"


def test_without_process_descriptors_the_template_still_works(monkeypatch):
    monkeypatch.setattr(sandbox, "_START", "import os; del os.pidfd_open; " + sandbox._START)
    sandbox.close()
    try:
        assert [run(f"def f(x): return {result}").status for result in ("x * x", "0")] == ["passed", "failed"]
    finally:
        sandbox.close()


def test_a_bad_row_is_an_error_and_no_verdict():
    for header, test in ((HEADER, "def check(candidate:"), (HEADER, "x = 1"), ("import no_such_module", TEST)):
        result = sandbox.run(header, "def f(x): return x * x", test, "f")
        assert result.status is None and result.error


def test_a_result_that_keeps_the_checker_busy_is_cut_in_time():
    ring = "def f(x):\n    node = ListNode(1)\n    node.next = node\n    return node"
    begun = time.monotonic()
    assert run(ring, "def check(candidate):\n    values(candidate(1))", timeout=0.5).status in ("timeout", "memory")
    assert time.monotonic() - begun < 60  # 2 s on a quiet machine


def test_time_asleep_counts_and_time_waiting_for_a_core_does_not():
    begun = time.monotonic()
    assert run("def f(x): time.sleep(60)", timeout=1.0).status == "timeout"
    assert 1 <= time.monotonic() - begun < 8  # 1.5 s on a quiet machine
    busy = ("def f(x):\n    t = time.process_time()\n    while time.process_time() - t < .2: pass\n    return x * x")
    found, many = [], 4 * len(os.sched_getaffinity(0))
    threads = [threading.Thread(target=lambda: found.append(run(busy, timeout=0.6).status)) for _ in range(many)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert found == ["passed"] * many


def test_arguments_changed_in_place_come_back():
    test = """def check(candidate):
    numbers, rows, kept = [3, 1, 2], [[1, 2], [3, 4]], [0]
    rows.append(kept)
    candidate(numbers)
    assert numbers == [1, 2, 3]
    candidate(rows)
    assert rows == [[0], [1, 2], [3, 4]]
    head = list_node([5, 6, 7])
    candidate(head)
    assert values(head) == [6, 7]
    table = {"a": [1], "b": {2}}
    inner = table["a"]
    candidate(table)
    assert table == {"a": [1, 9], "c": 1} and inner == [1, 9]
    twice = [[1]] * 2
    candidate(twice)
    assert twice == [[1], [1]] and twice[0] is twice[1]
    """
    answer = """
        def f(x):
            if isinstance(x, list): x.sort()
            elif isinstance(x, dict): x["a"].append(9); x["c"] = 1; del x["b"]
            else: x.val, x.next = x.next.val, x.next.next
        """
    assert run(answer, textwrap.dedent(test)).status == "passed"


def test_runs_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(run("def f(x):\n    while True: pass", timeout=0.3).status))
    thread.start()
    thread.join(20)
    assert found == ["timeout"]


def test_strict_refuses_where_a_layer_is_missing(monkeypatch):
    assert set(sandbox.layers()) == set(sandbox.LAYERS)
    monkeypatch.setattr(sandbox, "layers", lambda: dict.fromkeys(sandbox.LAYERS, True) | {"namespaces": False})
    with pytest.raises(sandbox.SandboxError, match="namespaces"):
        sandbox.run(HEADER, "def f(x): return 4", TEST, "f", mode="strict")
    with pytest.raises(ValueError, match="mode"):
        sandbox.run(HEADER, "def f(x): return 4", TEST, "f", mode="none")


def test_a_template_that_dies_is_replaced():
    assert run("def f(x): return x * x").status == "passed"
    for _ in range(2):
        sandbox._template._process.kill()
        assert run("def f(x): return x * x").status == "passed"


def test_nothing_survives_a_caller_that_is_killed():
    script = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from rewards import sandbox
sandbox.layers()
answer = "import os, time\\ndef f(x):\\n    if os.fork() == 0: os.setsid()\\n    time.sleep(1000)"
threading.Thread(target=sandbox.run, args=("", answer, {TEST!r}, "f"), kwargs=dict(timeout=100)).start()
time.sleep(1)
print(sandbox._template._process.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as caller:
        template = int(caller.stdout.readline())
        members = [pid for pid in os.listdir("/proc") if pid.isdigit() and _session(pid) == template]
        assert len(members) >= 2
        caller.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_session(pid) == template for pid in members):
        time.sleep(0.05)
    assert not any(_session(pid) == template for pid in members)


def _session(pid: str) -> int | None:
    try:
        return os.getsid(int(pid))
    except OSError:
        return None


@pytest.mark.parametrize("missing", ["user", "user pid net ipc mnt"])
def test_where_namespaces_are_missing_it_says_so_and_still_judges(missing):
    found = contained("""
        import logging, tempfile
        from rewards import sandbox
        logging.basicConfig()
        tempfile.tempdir = tempfile.mkdtemp()
        test = "def check(candidate):\\n    assert candidate(2) == 4"
        run = lambda text, **options: sandbox.run("import os, time", text, test, "f", timeout=0.3, **options).status
        found = [run("def f(x): open('a', 'w'); return x * x"), run("def f(x): return 0"), run("def f(x): time.sleep(9)")]
        try:
            run("def f(x): return 4", mode="strict")
        except sandbox.SandboxError as problem:
            print(json.dumps([found, str(problem), os.listdir(tempfile.tempdir)]))
        os.rmdir(tempfile.tempdir)
        """, missing)
    assert found[0] == ["passed", "failed", "timeout"]
    assert "candidate_namespace" in found[1] and ("namespaces," in found[1]) == (" " in missing)
    assert found[2] == []


def contained(script: str, missing: str = "") -> object:
    """Run a script in namespaces of its own, so that a hole in the sandbox reaches no one; returns its JSON output.
    There may be no further namespaces of the kinds in `missing`."""
    if not sandbox.layers()["namespaces"]:
        pytest.skip("needs user and pid namespaces")
    script = f"import os, json, sys, threading\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(script)
    forbid = f'for kind in {missing}; do echo 0 > /proc/sys/user/max_${{kind}}_namespaces; done; exec "$@"'
    outer = ["unshare", "-Urpf", "--kill-child", "--mount-proc", "sh", "-c", forbid, "sh"]
    done = subprocess.run([*outer, sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_process_file_or_folder_outlives_a_run():
    found = contained("""
        import tempfile, time
        from rewards import sandbox
        tempfile.tempdir = tempfile.mkdtemp()
        test = "def check(candidate):\\n    assert candidate(2) == 4"
        run = lambda body: sandbox.run("import os, time", "def f(x):\\n" + body, test, "f", timeout=0.25).status
        run("    return 4")
        template = set(os.listdir("/proc"))
        files = len(os.listdir("/proc/self/fd"))
        statuses = [run(body) for body in (
            "    if os.fork() == 0:\\n        os.setsid()\\n        if os.fork() == 0: time.sleep(1000)\\n    return 4",
            "    os.kill(-1, 9)\\n    return 5",
            "    for s in (9, 15, 19, 2): os.kill(1, s)\\n    return 5",
            "    for _ in range(40): os.fork()\\n    time.sleep(100)",
        )]
        ten = lambda: [run("    while True: pass") for _ in range(10)]
        threads = [threading.Thread(target=ten) for _ in range(2)]
        [t.start() for t in threads], [t.join() for t in threads]
        processes = [p for p in os.listdir("/proc") if p.isdigit() and p not in template]
        files = len(os.listdir("/proc/self/fd")) - files
        print(json.dumps([statuses, processes, files, os.listdir(tempfile.tempdir)]))
        os.rmdir(tempfile.tempdir)
        """)
    statuses, *left = found
    assert left == [[], 0, []]
    assert statuses[0] == "passed"
    assert "passed" not in statuses[1:]


def test_a_flood_of_output_does_not_reach_the_parent():
    grown = contained("""
        import resource
        from rewards import sandbox
        test = "def check(candidate):\\n    assert candidate(2) == 4"
        memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        sandbox.layers()
        before = memory()
        flood = "def f(x):\\n    while True:\\n        print('x' * 10**6)\\n        os.write(2, b'x' * 10**6)"
        sandbox.run("import os", flood, test, "f", timeout=1)
        sandbox.run("import os", "def f(x): return 'x' * (200 << 20)", test, "f", timeout=2)
        print(memory() - before)
        """)
    assert grown < 50


def test_a_field_never_stands_for_a_method_of_the_header():
    header = HEADER + "\nListNode.same = lambda self, other: self.val == other.val\nclass Other: pass\n"
    test = "def check(candidate):\n    assert candidate(1).same(ListNode(2))\n"
    for answer, status in (("def f(x):\n    node = ListNode(2)\n    return node", "passed"),
                           ("def f(x):\n    node = ListNode(1)\n    node.same = bool\n    return node", "runtime_error"),
                           ("def f(x):\n    node = Other()\n    node.same = bool\n    return node", "runtime_error")):
        assert sandbox.run(header, answer, test, "f", timeout=1.0).status == status


@pytest.mark.parametrize("answer, wanted", [
    ("from decimal import Decimal\ndef f(x): return Decimal(4)", "== 4"),
    ("from decimal import Decimal\ndef f(x): return Decimal('0.1')", ".as_tuple().exponent == -1"),
    ("def f(x): return {1: 2, 3: 4}.keys()", "== {1, 3}"),
    ("class ListNode:\n    __slots__ = 'val', 'next'\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
     "def f(x): return ListNode(1, ListNode(2))", ".next.val == 2"),
])
def test_results_of_other_kinds_travel(answer, wanted):
    assert run(answer, f"def check(candidate):\n    assert candidate(1) {wanted}\n").status == "passed"


def test_named_tuples_of_the_header_travel_both_ways():
    header = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\nclass Pair:\n    __slots__ = 'a'\n"
    test = "def check(candidate):\n    assert candidate(Point(1, 2)) == (2, 1)\n"
    answer = "def f(point):\n    x, y = point\n    return Point(y, x)"
    assert sandbox.run(header, answer, test, "f", timeout=1.0).status == "passed"
