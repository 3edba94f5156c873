"""Seven rewards for a reply that should contain a program: format, syntax, compile, runtime, pass, ast, efficiency.

Where the paper is silent this follows what the authors' release does: the choice of the block, the seven components,
their weights, 5 s and 1024 MB, the tree similarity, the reference's mean of four runs. Reconstructed here: how a
program is run and judged (sandbox.py), where a test run begins, the cache of timings, and the caps on sizes.

    scores = score(replies, rows)          # rows in LeetCodeDataset's schema: prompt, completion, entry_point, test
    total = sum(WEIGHTS[name] * scores[0][name] for name in NAMES)
"""

import ast
import contextlib
import difflib
import functools
import hashlib
import logging
import os
import platform
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rewards import sandbox, trees

NAMES = ("format", "syntax", "compile", "runtime", "pass", "ast", "efficiency")
WEIGHTS = dict(zip(NAMES, (0.05, 0.05, 0.05, 0.25, 0.60, 0.30, 0.20)))
MAX_CODE = 64 << 10   # bytes; a longer block is not parsed: syntax 0
REFERENCE_RUNS = 4

# How far each status got: syntax, compile, runtime, pass.
_REACHED = {"passed": (1, 1, 1, 1), "failed": (1, 1, 1, 0),
            "runtime_error": (1, 1, 0, 0), "timeout": (1, 1, 0, 0), "memory": (1, 1, 0, 0),
            "compile_error": (1, 0, 0, 0), "syntax_error": (0, 0, 0, 0), "no_code": (0, 0, 0, 0)}

log = logging.getLogger(__name__)


def score(replies: Sequence[str], rows: Sequence[dict], *, timeout: float = 5.0, memory_mb: int = 1024,
          workers: int | None = None, mode: str = "auto") -> list[dict]:
    """Score reply i against row i, programs side by side. Each dict holds the seven components before weights, and

    status       passed, failed (an assertion of the test), runtime_error, timeout, memory, compile_error, syntax_error,
                 no_code; None where `error` is set
    cpu_seconds  CPU time of the test run, as first measured on this machine; None if it did not begin, or cannot be told
                 because the answer started processes or threads
    error        None, or why there is NO SCORE: the sandbox broke, or the row is unusable. Never what the model did
                 wrong. The components are then 0.0 and mean nothing

    format: a closed fenced block of the reply defines the entry point. syntax: the block parses, within `timeout` and
    without crashing the parser. compile: header, block and test compile together. runtime: the test ended by passing or
    by an assertion of its own. pass: every test passed. ast: similarity of the syntax trees of block and `completion`.
    efficiency: pass * clip(1 - t / t_ref, 0, 1), t the CPU time of the test run alone, t_ref the mean of four runs of
    `completion`; 0 where one of the four fails. What an answer computes while it is defined is no part of t.

    workers: how many programs run at once, by default one a core. mode "strict" raises sandbox.SandboxError where a
    layer of the sandbox is missing.
    """
    if len(replies) != len(rows):
        raise ValueError(f"{len(replies)} replies for {len(rows)} rows")
    sandbox.require(mode)
    runner = functools.partial(sandbox.run, timeout=timeout, memory_mb=memory_mb)
    with ThreadPoolExecutor(workers or cores()) as pool:
        scores = list(pool.map(lambda reply, row: _guard(_judge, reply, row, runner), replies, rows))
        _add_times(scores, replies, rows, runner, pool)
    return scores


def paired_rounds(pairs: Sequence[tuple[dict, str, str]], *, rounds: int = 8, timeout: float = 5.0, memory_mb: int = 1024,
                  done: Sequence[Sequence[bool | None]] = (), keep: Callable[[list], object] = lambda outcome: None,
                  progress: Callable[[], object] = lambda: None) -> dict:
    """How often the first program of a pair is strictly faster than the second, as the paper measures efficiency.

    pairs: (row, first, second), both code for the row's test. Each round runs both programs of each pair one after the other
    on one pinned core, in an order that alternates from round to round. A pair counts if both passed in every round with a
    positive, finite CPU time. Returns {"rounds": the share in each round, "pairs": how many counted}; no round if none did.

    keep is called with each round's outcome, for each pair True, False, or None where it does not count; done: the outcomes of
    rounds that an earlier call kept, which are not run again.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    outcomes = [list(outcome) for outcome in done][:rounds]
    sandbox.close()                             # the template's successor inherits the core
    try:
        if affinity:
            os.sched_setaffinity(0, {max(affinity)})
        for n in range(len(outcomes), rounds):
            outcome, broken = [None] * len(pairs), False
            for i, (row, *codes) in enumerate(pairs):
                if all(earlier[i] is not None for earlier in outcomes):
                    ran = {k: sandbox.run(row["prompt"], codes[k], row["test"], row["entry_point"], timeout=timeout,
                                          memory_mb=memory_mb) for k in ((0, 1) if n % 2 == 0 else (1, 0))}
                    if all(r.status == "passed" and r.cpu_seconds and r.cpu_seconds > 0 for r in ran.values()):
                        outcome[i] = ran[0].cpu_seconds < ran[1].cpu_seconds
                    broken |= any(r.error is not None for r in ran.values())
                progress()
            outcomes.append(outcome)
            if not broken:      # what the sandbox could not run may run another time
                keep(outcome)
    finally:
        if affinity:
            os.sched_setaffinity(0, affinity)
        sandbox.close()
    counted = [i for i in range(len(pairs)) if all(outcome[i] is not None for outcome in outcomes)]
    return {"rounds": [sum(outcome[i] for i in counted) / len(counted) for outcome in outcomes] if counted else [],
            "pairs": len(counted)}


def extract_code(reply: str, entry_point: str) -> str | None:
    """The longest fenced block that defines the entry point's class or function; else the longest block; else None.

    Only text after the last </think> counts. Fences are CommonMark's: three or more backticks or tildes alone on a line
    but for an info string, indented or not, closed by at least as many. A block that is never closed (a reply cut off)
    is no block. Whether a block defines the name is decided by its text, since parsing it is for the sandbox.
    """
    found = _blocks(reply)
    return max([block for block in found if _defines(block, entry_point)] or found, key=len, default=None)


def last_block(reply: str) -> str | None:
    """The last fenced block after the last </think>, None if there is none."""
    return (_blocks(reply) or [None])[-1]


@functools.lru_cache(maxsize=4096)
def similarity(first: str, second: str) -> float:
    """Ratio in [0, 1] of matching tokens of two `trees.shape` strings, as difflib finds them."""
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


def _judge(reply: str, row: dict, runner: Callable) -> dict:
    if not isinstance(reply, str):
        raise TypeError(f"a reply must be text, not {type(reply).__name__}")
    header, test, entry_point = row["prompt"], row["test"], row["entry_point"]
    code = extract_code(reply, entry_point)
    if code is None:
        return _result("no_code")
    formatted = _defines(code, entry_point)
    if len(code.encode("utf-8", "surrogatepass")) > MAX_CODE:
        return _result("syntax_error", format=formatted)
    ran = runner(header, code, test, entry_point)
    if ran.error is not None:
        return _result(None, error=ran.error)
    result = _result(ran.status, format=formatted and (ran.shape is None or ran.defines), cpu_seconds=ran.cpu_seconds)
    reference = _reference_shape(row.get("completion") or "")
    if ran.shape is not None and reference is not None:
        result["ast"] = similarity(ran.shape, reference)
    return result


def _add_times(scores: list[dict], replies: Sequence[str], rows: Sequence[dict], runner: functools.partial,
               pool: ThreadPoolExecutor) -> None:
    """Replace the times of programs that were timed before on this machine, and set `efficiency` where the test passed."""
    timings = _timings_at(_timings_path())
    timed = {i: _key("answer", rows[i], extract_code(replies[i], rows[i]["entry_point"]))
             for i, result in enumerate(scores) if result["cpu_seconds"] is not None}
    stands = timings.keep({key: scores[i]["cpu_seconds"] for i, key in reversed(timed.items())})
    for i, key in timed.items():
        scores[i]["cpu_seconds"] = stands[key]

    references = {i: _key("reference", rows[i], rows[i].get("completion") or "", *runner.keywords.values())
                  for i in timed if scores[i]["status"] == "passed"}
    known = timings.keep(dict.fromkeys(references.values()))
    runs = {key: [pool.submit(_guard, _run_reference, rows[i], runner) for _ in range(REFERENCE_RUNS)]
            for i, key in references.items() if key not in known}
    done = {key: [run.result() for run in four] for key, four in runs.items()}
    errors = {key: run["error"] for key, four in done.items() for run in four if run["error"]}
    known |= timings.keep({key: _mean(four) for key, four in done.items() if key not in errors})
    for i, key in references.items():
        if key in errors:
            scores[i] = _result(None, error=f"the reference could not be timed: {errors[key]}")
        elif known[key] > 0:
            scores[i]["efficiency"] = min(max(1 - scores[i]["cpu_seconds"] / known[key], 0.0), 1.0)


def _run_reference(row: dict, runner: Callable) -> dict:
    if not row.get("completion"):
        return _result("no_code")
    ran = runner(row["prompt"], row["completion"], row["test"], row["entry_point"])
    return _result(ran.status, cpu_seconds=ran.cpu_seconds, error=ran.error)


def _mean(runs: list[dict]) -> float:
    """Mean CPU seconds, 0.0 where a run failed or its time cannot be told."""
    seconds = [run["cpu_seconds"] if run["status"] == "passed" else None for run in runs]
    return 0.0 if None in seconds else sum(seconds) / len(seconds)


def _guard(function, *args) -> object:
    """One bad sample never hurts the others: what it raises becomes its `error`."""
    try:
        return function(*args)
    except Exception as problem:
        log.debug("a sample could not be scored", exc_info=True)  # the caller counts and reports errors
        return _result(None, error=f"{type(problem).__name__}: {problem}")


def _result(status: str | None, *, format: bool = False, cpu_seconds: float | None = None,
            error: str | None = None) -> dict:
    values = (format, *_REACHED.get(status, (0, 0, 0, 0)), 0, 0)
    return dict(zip(NAMES, map(float, values))) | {"status": status, "cpu_seconds": cpu_seconds, "error": error}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- text and trees


def _blocks(reply: str) -> list[str]:
    blocks, fence, indent, lines = [], None, 0, []
    for line in re.split(r"\r\n|\r|\n", reply.rsplit("</think>", 1)[-1]):
        if fence is None:
            opening = re.fullmatch(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})(.*)", line)
            if opening:
                fence, indent, lines = opening[2], len(opening[1]), []
        elif re.fullmatch(rf"[ \t]*{re.escape(fence[0])}{{{len(fence)},}}[ \t]*", line):
            blocks.append("\n".join(lines))
            fence = None
        else:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))):])
    return blocks


def _defines(code: str, entry_point: str) -> bool:
    """Whether a line starts with `class Solution` for "Solution().f"; with `def f`, `class f` or `f =` for "f"."""
    name = re.escape(re.split(r"[(.\s]", entry_point.strip())[0])
    pattern = rf"class[ \t]+{name}\b"
    if "(" not in entry_point:
        pattern += rf"|(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*=(?!=)"
    return bool(name) and re.search(rf"^(?:{pattern})", code, re.MULTILINE) is not None


@functools.lru_cache(maxsize=4096)
def _reference_shape(completion: str) -> str | None:
    try:
        return trees.shape(ast.parse(completion)) if completion else None
    except (SyntaxError, ValueError, RecursionError):
        return None


# ---------------------------------------------------------------- timings that stay


class _Timings:
    """CPU seconds by program, Python and machine, in memory and in a file that processes share. The first measurement
    stands: the same program earns the same efficiency whenever it is scored again on this machine."""

    def __init__(self, path: Path):
        self._path, self._memory, self._lock, self._broken = path, {}, threading.Lock(), False

    def keep(self, measured: dict[str, float | None]) -> dict[str, float]:
        """Store what is new (None: nothing was measured); returns what stands for these keys."""
        with self._lock:
            new = {key: seconds for key, seconds in measured.items() if key not in self._memory}
            if new and not self._broken:
                try:
                    self._exchange(new)
                except (OSError, sqlite3.Error) as problem:
                    self._broken = True
                    log.warning("timings are not cached on disk, %s cannot be used: %s", self._path, problem)
            for key, seconds in new.items():
                if seconds is not None:
                    self._memory.setdefault(key, seconds)
            return {key: self._memory[key] for key in measured if key in self._memory}

    def _exchange(self, new: dict[str, float | None]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self._path, timeout=10)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS timings (key TEXT PRIMARY KEY, seconds REAL NOT NULL)")
            database.executemany("INSERT OR IGNORE INTO timings VALUES (?, ?)",
                                 [(key, seconds) for key, seconds in new.items() if seconds is not None])
            for key in new:
                self._memory.update(database.execute("SELECT key, seconds FROM timings WHERE key = ?", (key,)))


_timings_at = functools.cache(_Timings)         # by path


def _timings_path() -> Path:
    return Path(os.environ.get("CORRGRPO_CACHE") or Path.home() / ".cache" / "corrgrpo") / "timings.sqlite"


def _key(kind: str, row: dict, code: str, *limits: object) -> str:
    """One program on one machine."""
    parts = (kind, row["prompt"], code, row["test"], row["entry_point"], *limits, platform.python_version(), _machine())
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@functools.cache
def _machine() -> str:
    """Processor model and host name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} {platform.node()}"
    return f"{platform.processor()} {platform.node()}"
