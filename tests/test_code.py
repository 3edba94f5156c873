"""The seven code rewards: what each number means, and when there is none."""

import gzip
import importlib.util
import json
import os
import sqlite3
import textwrap
from pathlib import Path

import pytest

from rewards import code, sandbox

FENCE = "```"
HEADER = "import time\nfrom typing import *\n"
TEST = "def check(candidate):\n    for n in range(20):\n        assert candidate(n=n) == n * (n + 1) // 2\n"
SLOW = """
class Solution:
    def f(self, n: int) -> int:
        total = 0
        for _ in range(2000):
            total = 0
            for k in range(n + 1):
                total += k
        return total
"""
FAST = "class Solution:\n    def f(self, n: int) -> int:\n        return n * (n + 1) // 2\n"
ROW = {"prompt": HEADER, "completion": SLOW, "entry_point": "Solution().f", "test": TEST}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CORRGRPO_CACHE", str(tmp_path))


def fenced(text: str, info: str = "python") -> str:
    return f"Sure:\n{FENCE}{info}\n{text.strip()}\n{FENCE}\n"


def components(result: dict) -> list[float]:
    return [result[name] for name in code.NAMES[:5]]


def test_order_and_default_weights():
    assert code.NAMES == ("format", "syntax", "compile", "runtime", "pass", "ast", "efficiency") == tuple(code.WEIGHTS)
    assert list(code.WEIGHTS.values()) == [0.05, 0.05, 0.05, 0.25, 0.60, 0.30, 0.20]


def test_each_status_reaches_its_components_and_one_bad_sample_hurts_no_other():
    body = "class Solution:\n    def f(self, n):\n        "
    cases = [
        (fenced(FAST), "passed", [1, 1, 1, 1, 1]),
        (fenced(body + "return n"), "failed", [1, 1, 1, 1, 0]),
        (fenced(body + "assert n < 3\n        return n * (n + 1) // 2"), "runtime_error", [1, 1, 1, 0, 0]),
        (fenced(body + "import os; os._exit(0)"), "runtime_error", [1, 1, 1, 0, 0]),
        (fenced(body + "while True: pass"), "timeout", [1, 1, 1, 0, 0]),
        (fenced(body + "return [0] * 10**10"), "memory", [1, 1, 1, 0, 0]),
        (fenced("from __future__ import annotations\n" + FAST), "compile_error", [1, 1, 0, 0, 0]),
        (fenced(body + "return )"), "syntax_error", [1, 0, 0, 0, 0]),
        (fenced(FAST + "#" * code.MAX_CODE), "syntax_error", [1, 0, 0, 0, 0]),
        (fenced("print('hello')"), "runtime_error", [0, 1, 1, 0, 0]),
        (fenced('"""\nclass Solution:\n"""'), "runtime_error", [0, 1, 1, 0, 0]),
        (FAST, "no_code", [0, 0, 0, 0, 0]),
        ("", "no_code", [0, 0, 0, 0, 0]),
    ]
    rows = [ROW] * len(cases) + [{"prompt": ""}, ROW, ROW | {"prompt": "import no_such_module"}]
    results = code.score([case[0] for case in cases] + [fenced(FAST), None, fenced(FAST)], rows, timeout=1.0)
    for (reply, status, expected), result in zip(cases, results):
        assert set(result) == {*code.NAMES, "status", "cpu_seconds", "error"}
        assert (result["status"], components(result), result["error"]) == (status, expected, None), reply
        assert all(type(result[name]) is float and 0 <= result[name] <= 1 for name in code.NAMES)
    for result in results[len(cases):]:
        assert result["error"] and result["status"] is None


def test_efficiency_is_earned_against_the_reference():
    reference_fails = ROW | {"completion": SLOW.replace("return total", "return 0")}
    rows = [ROW, ROW | {"completion": FAST}, reference_fails, ROW | {"completion": ""}]
    fast, slow, failing, missing = code.score([fenced(FAST), fenced(SLOW), fenced(FAST), fenced(FAST)], rows)
    assert [result["pass"] for result in (fast, slow, failing, missing)] == [1, 1, 1, 1]
    assert fast["efficiency"] > 0.5
    assert [result["efficiency"] for result in (slow, failing, missing)] == [0, 0, 0]
    assert missing["ast"] == 0


def test_the_same_program_earns_the_same_whenever_it_is_scored():
    wrong = fenced("class Solution:\n    def f(self, n): return sum(range(n))")
    replies, rows = [fenced(FAST)] * 3 + [fenced(SLOW), wrong], [ROW] * 5
    first = code.score(replies, rows)
    assert first[0] == first[1] == first[2]
    code._timings_at.cache_clear()  # as a new process would
    assert code.score(replies, rows) == first


def test_a_cache_that_cannot_be_used_warns_once_and_costs_no_score(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CORRGRPO_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        (result,) = code.score([fenced(FAST)], [ROW])
        assert result["pass"] == 1 and result["efficiency"] > 0.5
    assert len([record for record in caplog.records if "not cached" in record.message]) == 1
    broken = tmp_path / "timings.sqlite"
    broken.write_bytes(b"no database" * 100)
    monkeypatch.setenv("CORRGRPO_CACHE", str(tmp_path))
    assert code.score([fenced(FAST)], [ROW])[0]["efficiency"] > 0.5


def test_the_cache_holds_times_and_no_verdicts(tmp_path):
    assert code.score([fenced(FAST)], [ROW])[0]["status"] == "passed"
    with sqlite3.connect(tmp_path / "timings.sqlite") as database:
        assert database.execute("SELECT count(*) FROM timings").fetchone() == (2,)  # the answer's and the reference's


def test_an_infrastructure_failure_is_no_score_and_spares_the_others(monkeypatch):
    attempt, wrong = sandbox._attempt, fenced("class Solution:\n    def f(self, n): return -1")

    def fail(header, job, test):
        if "return -2" in job["answer"]:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return attempt(header, job, test)
    monkeypatch.setattr(sandbox, "_attempt", fail)
    results = code.score([wrong, wrong.replace("-1", "-2"), wrong], [ROW] * 3)
    assert [bool(result["error"]) for result in results] == [False, True, False]
    assert [result["status"] for result in results] == ["failed", None, "failed"]


def test_a_machine_that_starts_no_process_gives_errors_and_recovers(monkeypatch):
    sandbox.layers()
    sandbox.close()

    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox.subprocess, "Popen", refuse)
        results = code.score([fenced(FAST)] * 3, [ROW] * 3)
    assert all(result["status"] is None and "unavailable" in result["error"] for result in results)
    assert code.score([fenced(FAST)], [ROW])[0]["status"] == "passed"


def test_ast_is_blind_to_names_and_literals_and_needs_parsing_only():
    renamed = SLOW.replace("total", "answer").replace("k", "item").replace("2000", "7").replace("n + 1", "n + 2")
    shorter = "class Solution:\n    def f(self, n): return -1"
    copy, other, broken = code.score([fenced(renamed), fenced(shorter), fenced(SLOW + "(")], [ROW] * 3)
    assert copy["ast"] == 1.0 and copy["pass"] == 0
    assert 0 < other["ast"] < 0.7
    assert broken["ast"] == 0
    (uncompiled,) = code.score([fenced("from __future__ import annotations\n" + SLOW)], [ROW])
    assert uncompiled["compile"] == 0 and uncompiled["ast"] > 0.9


@pytest.mark.parametrize("reply, expected", [
    (f"{FENCE}python\nclass Solution: pass\n{FENCE}", "class Solution: pass"),
    (f"{FENCE}py\nclass Solution: pass\n{FENCE}", "class Solution: pass"),
    (f"{FENCE}Python3\r\nclass Solution: pass\r\n{FENCE}\r\n", "class Solution: pass"),
    (f"{FENCE}\nclass Solution: pass\n{FENCE}", "class Solution: pass"),
    ("~~~python\nclass Solution: pass\n~~~", "class Solution: pass"),
    (f"1. So:\n   {FENCE}python\n   class Solution:\n       x = 1\n   {FENCE}", "class Solution:\n    x = 1"),
    # of two that define it the longest, even beside a longer one that does not
    (f"{FENCE}\nclass Solution: pass\n{FENCE}\n{FENCE}\nclass Solution: x = 1\n{FENCE}\n{FENCE}\n{'#' * 99}\n{FENCE}",
     "class Solution: x = 1"),
    (f"{FENCE}\nx\n{FENCE}\nand\n{FENCE}\nlonger\n{FENCE}", "longer"),   # none defines it
    (f"{FENCE}\nclass Solutions: pass\n{FENCE}\n{FENCE}\nclass Solution: 1\n{FENCE}", "class Solution: 1"),
    (f"<think>\n{FENCE}\nclass Solution: thought\n{FENCE}\n</think>\n{FENCE}\nclass Solution: 1\n{FENCE}",
     "class Solution: 1"),
    (f"{FENCE}\nclass Solution: thought\n{FENCE}\n</think> done", None),
    (f"{FENCE}python\nclass Solution: pass", None),                      # cut off
    (f"{FENCE}\nx = 1\n{FENCE}\n{FENCE}python\nclass Solution: pass", "x = 1"),
    (f"{FENCE}{FENCE}\nclass Solution: '''\n{FENCE}\n'''\n{FENCE}{FENCE}", f"class Solution: '''\n{FENCE}\n'''"),
    (f"{FENCE}python\n{FENCE}", ""),
    ("class Solution: pass", None),
])
def test_extract_code(reply, expected):
    assert code.extract_code(reply, "Solution().f") == expected


def test_a_plain_function_may_be_the_entry_point():
    row = ROW | {"entry_point": "f", "completion": "def f(n):\n    return sum(range(n + 1))\n"}
    replies = [fenced(text) for text in ("def f(n): return n * (n + 1) // 2", "f = lambda n: n * (n + 1) // 2",
                                         "def g(n): return n * (n + 1) // 2")]
    results = code.score(replies, [row] * 3)
    assert [(result["format"], result["status"]) for result in results] == [
        (1, "passed"), (1, "passed"), (0, "runtime_error")]


def test_real_references_score_one():
    folder = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    path = folder / "leetcode" / "LeetCodeDataset-v0.3.1-test.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"LeetCodeDataset is not there: {path}; set CORRGRPO_DATA")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    if importlib.util.find_spec("sortedcontainers") is None:
        rows = [row for row in rows if "sortedcontainers" not in row["prompt"] + row["completion"]]
    rows = rows[:6]
    results = code.score([fenced(row["completion"]) for row in rows], rows, timeout=15.0)
    for row, result in zip(rows, results):
        assert (result["status"], components(result), result["ast"]) == ("passed", [1] * 5, 1), row["task_id"]
        assert 0 <= result["efficiency"] < 0.6
    wrong = [fenced(textwrap.dedent(row["completion"]).replace("return ", "return not ")) for row in rows]
    assert all(result["pass"] == 0 and result["format"] == 1 for result in code.score(wrong, rows))
