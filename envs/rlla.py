"""Tool calls on RLLA rows: ToolRL's RLLA-4K (Qian et al. 2025, arXiv 2504.13958; qiancheng0/ToolRL, dataset/rlla_4k), files in
its schemas, or rows made here from data/tools.json.

One turn: the row's system and user messages are the prompt, the reply is scored by `rewards.tool` with four components.
"""

import json
import random
from pathlib import Path
from typing import Any

from envs import Episode, Score, Task, rows
from rewards import tool

TOOLS = Path(__file__).parent.parent / "data" / "tools.json"
TINY_ROWS = {"train": 600, "test": 100}

_SYSTEM = """You solve the user's tasks with tools.

**Available Tools**
{tools}

**Output Format**
<think> I should use Tool name. </think>
<tool_call>
{{"name": "Tool name", "parameters": {{"Parameter name": "Parameter content"}}}}
</tool_call>
One line in <tool_call> for each call. Where no tool helps:
<think> No tool is needed. </think>
<response> Your answer </response>"""


class RLLA:
    reward_names = tool.NAMES
    reward_weights = (1.0, 1.0, 1.0, 1.0)       # the scales are in the components

    def __init__(self, data: str = "tiny"):
        """data: "tiny", the rows made here; a .jsonl, .json or .parquet file ("{split}" is filled in), also under
        $CORRGRPO_DATA; or a data set name on the Hugging Face hub. The published split is train.parquet with 3,920 rows and
        test.parquet with 80, 71 of which call tools."""
        self.data, self.notes = data, {}

    def tasks(self, split: str) -> list[Task]:
        """Rows whose reference is damaged are named; they stay in the split "test", as published, and go from any other."""
        source, found = (f"{TOOLS.name}, {split}", tiny(split)) if self.data == "tiny" else rows.load(self.data, split)
        tasks, damaged = [], {}
        for line, row in found:
            index, messages, reference = _read(source, line, row)
            problem = tool.damage(reference)
            if problem:
                damaged[index] = problem
            if not problem or split == "test":
                tasks.append(Task(f"{split}-{index}", messages, data=reference))
        if damaged:
            self.notes[f"damaged references in {source}"] = damaged
            print(f"{source}: the references of rows {', '.join(map(str, damaged))} are damaged "
                  f"({'kept, as published' if split == 'test' else 'left out'}); the first: {next(iter(damaged.values()))}")
        return tasks

    def start(self, task: Task) -> Episode:
        return Episode(task)

    def reference(self, task: Task) -> str:
        return task.data

    def score(self, episodes: list[Episode]) -> list[Score]:
        scores = []
        for e in episodes:
            r = tool.score(e.reply, e.task.data)
            shares = ("name_score", "parameter_score", "value_score", "all_exact")
            scores.append(Score({name: r[name] for name in tool.NAMES},     # shares over the rows that call tools
                                {name: float(r[name]) if r["calls"] else None for name in shares}, r["error"]))
        return scores

    def measures(self, sample: dict[str, Any]) -> dict[str, float | None]:
        """The paper's columns: the first four over the rows that call tools."""
        m = sample["metrics"]
        return {"function name": m["name_score"], "parameter name": m["parameter_score"], "parameter value": m["value_score"],
                "all exact": m["all_exact"], "format": sample["rewards"]["format"]}


def _read(source: str, line: int, row: Any) -> tuple[Any, list[dict[str, str]], str]:
    """(index, messages, reference) of a row in one of RLLA's three schemas."""
    try:
        extra = row.get("extra_info") or {}
        index = row.get("index", extra.get("index", line - 1))
        if "instruction" in row:                                            # rlla_sft.json
            row = {"prompt": [{"role": "system", "content": row["instruction"]}, {"role": "user", "content": row["input"]}],
                   "ground_truth": row["output"]}
        reference = row["ground_truth"] if "ground_truth" in row else row["reward_model"]["ground_truth"]
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in row["prompt"]]
        if not messages or not all(isinstance(text, str) for text in (reference, *(m["content"] for m in messages))):
            raise TypeError("a text is missing or no string")
        return index, messages, reference
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{source}, row {line}: no RLLA row ({type(e).__name__}: {e}); it needs prompt (messages) and "
                         "ground_truth, or reward_model.ground_truth, or instruction, input and output") from None


# ---------------------------------------------------------------- rows made here


def tiny(split: str) -> list[tuple[int, dict[str, Any]]]:
    """(number, row): one to three calls, or a direct answer, with two to four tools in the prompt. The test split has other
    phrasings, and half of its rows only tools that the train split never shows. The same rows on every machine."""
    if split not in TINY_ROWS:
        raise ValueError(f"env.data = 'tiny' has the splits {', '.join(TINY_ROWS)}, not {split!r}")
    made, draw = json.loads(TOOLS.read_text(encoding="utf-8")), random.Random(f"rlla tiny {split}")
    asks = "asks" if split == "train" else "held_out_asks"
    out = []
    for i in range(TINY_ROWS[split]):
        pool = made["held_out_tools"] if split == "test" and i % 2 else made["tools"]
        tools = draw.sample(pool, draw.choice((2, 2, 3, 4)))
        calls, texts = [], []
        for t in tools[: draw.choices((0, 1, 2, 3), (10, 78, 9, 3))[0]]:
            chosen = {name: draw.choice(made["pools"][p["values"]]) for name, p in t["parameters"].items()}
            both = {name: c if isinstance(c, list) else [c, c] for name, c in chosen.items()}       # value, how it is said
            texts.append(draw.choice(t[asks]).format(**{name: said for name, (_, said) in both.items()}))
            calls.append({"name": t["name"], "parameters": {name: value for name, (value, _) in both.items()}})
        if calls:
            names = ", then ".join(call["name"] for call in calls)
            ask = draw.choice(made["joins"][asks]).join(texts)
            lines = "\n".join(map(json.dumps, calls))
            answer = f"<think> I should use {names}. </think>\n<tool_call>\n{lines}\n</tool_call>"
        else:
            ask, text = draw.choice(made["chat"][asks])
            answer = f"<think> No tool is needed. </think>\n<response> {text} </response>"
        draw.shuffle(tools)
        listed = "\n".join(
            f"{n}. Name: {t['name']}\nDescription: {t['description']}\nParameters: "
            + json.dumps({name: {"type": p["type"], "description": p["description"]} for name, p in t["parameters"].items()})
            for n, t in enumerate(tools, 1))
        out.append((i, {"index": i, "ground_truth": answer, "prompt": [
            {"role": "system", "content": _SYSTEM.format(tools=listed)},
            {"role": "user", "content": f"**Dialogue Records History**\n<user> {ask} </user>"}]}))
    return out
