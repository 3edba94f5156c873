"""MBPP (Austin et al. 2021, arXiv 2108.07732; google-research, mbpp), for evaluation only: 974 problems, 427 sanitized ones.

The prompt is the task's sentence and its three assertions. They call the reply's function outside its reach; in the three
problems whose tests also use a class of the reply's, the left side of each comparison is computed beside the reply and compared
outside.
"""

import ast
from typing import Any

from envs import Task, programs, rows

FILES = {"mbpp": "mbpp/mbpp.jsonl", "sanitized": "mbpp/sanitized-mbpp.json"}    # as in google-research/google-research, mbpp
TEST_IDS = range(11, 511)


class MBPP(programs.Programs):
    def __init__(self, data: str = "mbpp", timeout: float = 10.0, memory_mb: int = 1024, workers: int = 0):
        """data: "mbpp" or "sanitized", mbpp/mbpp.jsonl and mbpp/sanitized-mbpp.json under $CORRGRPO_DATA (of
        google-research/google-research, mbpp); or a file of such rows. timeout: CPU seconds for a problem's assertions."""
        self.data, self.limits = data, {"timeout": timeout, "memory_mb": memory_mb, "workers": workers}

    def tasks(self, split: str = "all") -> list[Task]:
        """split: "all", or "test": the published task ids 11 to 510."""
        source, found = rows.load(FILES.get(self.data, self.data), "test")
        tasks = []
        for line, row in found:
            try:
                if split == "all" or row["task_id"] in TEST_IDS:
                    tasks.append(Task(f"mbpp-{row['task_id']}", [{"role": "user", "content": _prompt(row)}], data=row))
            except (KeyError, TypeError) as e:
                raise ValueError(f"{source}, row {line}: no MBPP row, it needs task_id, text or prompt, code and test_list "
                                 f"({type(e).__name__}: {e})") from None
        return tasks

    def reference(self, task: Task) -> str:
        return f"```python\n{task.data['code']}\n```"

    def program(self, task: Task, reply: str) -> programs.Program:
        row, (name, others) = task.data, _names(task.data)
        answer = programs.answer(reply, name)
        header, setup = "\n".join(row.get("test_imports") or []), row.get("test_setup_code") or ""
        if not others:
            imports = [ast.unparse(node) for node in ast.parse(row["code"]).body        # which the tests may use
                       if isinstance(node, ast.Import | ast.ImportFrom)]
            lines = [f"{name} = candidate", *setup.splitlines(), *row["test_list"]]
            return programs.Program(header, answer, ["\n".join([*imports, _check(lines)])], name)
        pairs = [(ast.unparse(c.left), ast.unparse(c.comparators[0])) for c in map(_comparison, row["test_list"])]
        lefts = ", ".join(f"lambda: {left}" for left, _ in pairs)
        if answer is not None:
            answer += f"\n{setup}\nleft_sides = [{lefts}]\n"
        tests = [_check(f"assert candidate({i}) == {right}" for i, (_, right) in enumerate(pairs))]
        return programs.Program(header, answer, tests, "(lambda i: left_sides[i]())")


def _prompt(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return (f"{row['text'] if 'text' in row else row['prompt']}\nAnswer with the code in one ```python block. It must pass "
            f"these tests:\n\n```python\n{tests}\n```")


def _names(row: dict[str, Any]) -> tuple[str, set[str]]:
    """The function that the assertions call, and what else of the reference they or their set-up use."""
    defined = {node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = [node.func.id for test in row["test_list"] for node in ast.walk(ast.parse(test))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined]
    setup = {node.id for node in ast.walk(ast.parse(row.get("test_setup_code") or "")) if isinstance(node, ast.Name)}
    return used[0], (set(used[1:]) | (setup & defined)) - {used[0]}


def _comparison(test: str) -> ast.Compare:
    return ast.parse(test).body[0].test


def _check(lines) -> str:
    return "def check(candidate):\n" + "".join(f"    {line}\n" for line in lines)
