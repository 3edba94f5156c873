"""Code generation on LeetCodeDataset rows (newfacade/LeetCodeDataset, v0.2.0 and v0.3.x) or on the starter problems.

One turn: the row's `query` is the prompt, the reply is scored by `rewards.code` with seven components.
"""

from pathlib import Path
from typing import Any

from envs import Episode, Score, Task, rows
from rewards import code
from rewards.sandbox import SandboxError, layers, require

STARTER = Path(__file__).parent.parent / "data"
NEEDED = ("task_id", "prompt", "completion", "entry_point", "test", "query")  # what both schemas share and we use


class LeetCode:
    reward_names = code.NAMES
    reward_weights = tuple(code.WEIGHTS[name] for name in code.NAMES)

    def __init__(self, data: str = "starter", timeout: float = 5.0, memory_mb: int = 1024, workers: int = 0,
                 sandbox: str = "auto"):
        """data: "starter", or "starter-easy" with the one-liners alone in the train split; a .jsonl, .jsonl.gz or .parquet
        file, where "{split}" stands for the split's name, looked for as given and then under $CORRGRPO_DATA; or a data
        set name on the Hugging Face hub. timeout: seconds a program may run. workers: programs side by side, 0 for one
        a core. sandbox: "strict" refuses to run where a layer is missing."""
        try:
            require(sandbox)
        except SandboxError as e:
            raise ValueError(f"env.sandbox = {sandbox!r}: {e}") from None
        self.notes = {"sandbox": layers()}
        self.data = data
        self.limits = {"timeout": timeout, "memory_mb": memory_mb, "workers": workers or None, "mode": sandbox}

    def tasks(self, split: str) -> list[Task]:
        return [Task(row["task_id"], [{"role": "user", "content": row["query"]}], data=row)
                for row in load_rows(self.data, split)]

    def start(self, task: Task) -> Episode:
        return Episode(task)

    def reference(self, task: Task) -> str:
        return f"```python\n{task.data['completion'].strip()}\n```"

    def score(self, episodes: list[Episode]) -> list[Score]:
        results = code.score([e.reply for e in episodes], [e.task.data for e in episodes], **self.limits)
        return [Score({name: r[name] for name in code.NAMES},
                      {"status": r["status"]}, r["error"]) for r in results]

    def measures(self, sample: dict[str, Any]) -> dict[str, float]:
        r = sample["rewards"]
        return {"Executable": r["runtime"], "Pass@1": r["pass"], "format": r["format"], "tree similarity": r["ast"]}


def load_rows(data: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split in LeetCodeDataset's schema. Raises ValueError that names the file and the line."""
    found = rows.texts(str(STARTER / "starter-{split}.jsonl") if data in ("starter", "starter-easy") else data, split, NEEDED)
    return [row for row in found if row["difficulty"] == "Easy"] if (data, split) == ("starter-easy", "train") else found
