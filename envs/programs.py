"""What the code benchmarks have in common: one reply, a program in it, tests in the sandbox, one reward: all of them passed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envs import Episode, Score, Task
from rewards import code, sandbox


@dataclass
class Program:
    """tests: texts that define check(candidate), as rewards.sandbox.run takes them, run one by one until one fails."""

    header: str
    answer: str | None          # None: the reply has no code
    tests: Sequence[str]
    entry_point: str


def answer(reply: str, entry_point: str) -> str | None:
    """The fenced block that defines the entry point, or else all that follows the thoughts where there is no block."""
    reply = reply.rsplit("</think>", 1)[-1]
    return code.extract_code(reply, entry_point) if "```" in reply or "~~~" in reply else reply


def judge(programs: list[Program], *, timeout: float, memory_mb: int, workers: int = 0) -> list[Score]:
    """timeout: CPU seconds for one test. metrics: status (the first that is not "passed"), cpu_seconds (of all tests run)."""
    def run(program: Program) -> Score:
        if program.answer is None:
            return Score({"pass": 0.0}, {"status": "no_code", "cpu_seconds": None})
        seconds: float | None = 0.0
        for test in program.tests:
            ran = sandbox.run(program.header, program.answer, test, program.entry_point, timeout=timeout, memory_mb=memory_mb)
            if ran.error is not None:
                return Score({}, error=ran.error)
            seconds = None if seconds is None or ran.cpu_seconds is None else seconds + ran.cpu_seconds
            if ran.status != "passed":
                return Score({"pass": 0.0}, {"status": ran.status, "cpu_seconds": seconds})
        return Score({"pass": 1.0}, {"status": "passed", "cpu_seconds": seconds})

    with ThreadPoolExecutor(workers or code.cores()) as pool:
        return list(pool.map(run, programs))


class Programs:
    """A benchmark of programs. What is its own: limits of `judge`, tasks(split), program(task, reply) and, where there are
    solutions, reference(task)."""

    reward_names, reward_weights = ("pass",), (1.0,)

    def start(self, task: Task) -> Episode:
        return Episode(task)

    def score(self, episodes: list[Episode]) -> list[Score]:
        return judge([self.program(e.task, e.reply) for e in episodes], **self.limits)

    def measures(self, sample: dict) -> dict[str, float]:
        """Pass@1, and how many programs ran to the end or to a failed assertion."""
        return {"Pass@1": sample["rewards"]["pass"], "Executable": float(sample["metrics"]["status"] in ("passed", "failed"))}
