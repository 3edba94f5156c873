"""API-Bank (Li et al. 2023, arXiv 2304.08244; DAMO-ConvAI, api-bank), for evaluation only: one tool call from a dialogue.

Two judges, named in every result:
- "static": ToolRL's processed levels 1 to 3 (qiancheng0/ToolRL, benchmarks). Right if a call after the last <tool_call> has the
  reference's name and exactly its parameters. Needs those three files and nothing else.
- "execution", the paper's: v1 are the API turns of upstream's level-1-given-desc dialogues, v2 those of level-2-toolsearcher,
  v3 of dialogues of level 3, which upstream's repository lacks. Right if the first call has the gold call's name and upstream's
  checker accepts what it returns. Upstream's code runs in a process of its own (apibank_judge.py), never in this one. v3 keeps
  one tool manager for all its calls, as upstream does: judge one sample a task, and after an interruption anew with --rescore.

The dialogue up to the API turn, in RLLA's template, is the prompt. Reconstructed here: its wording, and which tools it lists:
those that the dialogue calls; in v2 ToolSearcher and what it has found so far.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs import Episode, Score, Task, rows
from rewards import sandbox, tool

VERSIONS = {"level-1-given-desc": "v1", "level-2-toolsearcher": "v2"}   # of upstream's splits; any level 3 is v3
STARTUP = 120.0     # seconds that upstream's imports may take
STATIC = "api_bank/level-{level}-api_processed.json.gz"

_SYSTEM = """You hold a conversation and solve the user's tasks with tools.

**Available Tools**
{tools}

**Output Format**
<think> Your thoughts </think>
<tool_call>
{{"name": "Tool name", "parameters": {{"Parameter name": "Parameter content"}}}}
</tool_call>"""


class APIBank:
    reward_names = ("correct",)
    reward_weights = (1.0,)

    def __init__(self, judge: str = "static", data: str = "", root: str = "", timeout: float = 30.0):
        """data: static: the processed files, "{level}" is filled in, also under $CORRGRPO_DATA; execution: the dialogues as
        rows {split, file, turns}, "" for those in the checkout. root: the folder of upstream's tool_manager.py, apis and
        init_database. timeout: seconds that a call may take there."""
        if judge not in ("static", "execution"):
            raise ValueError(f"env.judge = {judge!r}: there are static and execution")
        self.judge, self.data, self.notes, self.checkout = judge, data, {"judge": judge}, None
        self.averages = {f"{what} ({judge})": [f"{v}{part} ({judge})" for v in ("v1", "v2", "v3")]
                         for what, part in (("average", ""), ("average ceiling", " ceiling"))}
        if judge == "execution":
            named = Path(root).expanduser()
            folder = next((f for f in (named, named / "api-bank") if (f / "tool_manager.py").is_file()), None)
            if not root or folder is None:
                raise ValueError(f"env.root = {root!r}: the execution judge needs the api-bank folder of a checkout of "
                                 "AlibabaResearch/DAMO-ConvAI, which holds tool_manager.py; or use env.judge = 'static'")
            self.checkout = Checkout(folder, timeout)

    def tasks(self, split: str = "test") -> list[Task]:
        return list(self._dialogues() if self.checkout else self._processed())

    def start(self, task: Task) -> Episode:
        return Episode(task)

    def reference(self, task: Task) -> str:
        return f"<think> I should call {task.data['name']}. </think>\n<tool_call>\n{_line(task.data)}\n</tool_call>"

    def score(self, episodes: list[Episode]) -> list[Score]:
        """metrics: version, judge, and reachable: whether the gold call itself is right (execution), or its tool is in the
        prompt (static)."""
        scores = []
        for e in episodes:
            gold = e.task.data
            if self.checkout:
                found = _calls(tool.answer(e.reply).partition("<tool_call>")[2].strip().split("\n")[0])
                right, detail = self.checkout.judge(gold["version"], found[0], gold) if found else (False, "no call")
                reachable, _ = self.checkout.judge(f"{gold['version']} gold", gold, gold)
            else:
                found = _calls(e.reply.rpartition("<tool_call>")[2])
                right, detail, reachable = any(tool.same(call, gold) for call in found), "", gold["listed"]
            scores.append(Score({"correct": float(right)}, {"version": gold["version"], "judge": self.judge,
                                                            "reachable": float(reachable), "detail": detail}))
        return scores

    def measures(self, sample: dict[str, Any]) -> dict[str, float]:
        version, correct = sample["metrics"]["version"], sample["rewards"]["correct"]
        return {f"{version} ({self.judge})": correct, f"{version} ceiling ({self.judge})": sample["metrics"]["reachable"]}

    def _processed(self) -> Iterator[Task]:
        for level in (1, 2, 3):
            source, found = rows.load((self.data or STATIC).replace("{level}", str(level)), "test")
            unlisted, undated = [], []
            for line, row in found:
                try:
                    answer = row["answer"][0] if isinstance(row["answer"], list) else row["answer"]
                    system, user, name, parameters = row["system"], row["user"], answer["name"], answer["parameters"]
                    if not (all(isinstance(text, str) for text in (system, user, name)) and isinstance(parameters, dict)):
                        raise TypeError("system, user and the answer's name are texts, its parameters an object")
                except (KeyError, IndexError, TypeError) as e:
                    raise ValueError(f"{source}, row {line}: it needs system, user, answer ({type(e).__name__}: {e})") from None
                listed = f". Name: {name}\n" in system or f". {name}: " in system
                unlisted += [] if listed else [line - 1]
                undated += [line - 1] if "2023" in json.dumps(parameters) and "2023" not in system + user else []
                yield Task(f"v{level}:{line - 1}", [{"role": "system", "content": system}, {"role": "user", "content": user}],
                           data={"name": name, "parameters": parameters, "version": f"v{level}", "listed": listed})
            if unlisted or undated:
                self.notes[source] = {"tool missing from the prompt": unlisted, "year missing from the prompt": undated}
                print(f"{source}: the prompt lacks the tool in rows {unlisted or 'none'}, the year 2023 in {len(undated)} rows")

    def _dialogues(self) -> Iterator[Task]:
        if self.data:
            source, found = rows.load(self.data, "test")
            dialogues = [(f"{source}, row {line}", row) for line, row in found]
        else:
            files = sorted(self.checkout.folder.glob("lv1-lv2-samples/level-*/*.jsonl"))
            source = str(self.checkout.folder)
            dialogues = [(str(f), {"split": f.parent.name, "file": f.name,
                                   "turns": [row for _, row in rows.load(str(f), "")[1]]}) for f in files]
        unlisted: dict[str, list[str]] = {}
        for where, dialogue in dialogues:
            try:
                said = [_said(turn) for turn in dialogue["turns"]]
                version = VERSIONS.get(dialogue["split"], "v3" if dialogue["split"].startswith("level-3") else "")
                name = dialogue["file"]
            except (KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"{where}: it needs split, file and turns, of which each has role, and text or api_name, "
                                 f"param_dict and result ({type(e).__name__}: {e})") from None
            for i, turn in enumerate(dialogue["turns"] if version else []):
                if turn["role"] == "API":
                    before = dialogue["turns"][:i]
                    tools = self._tools(version, dialogue["turns"], before)
                    task_id = f"{version}:{name}:{i}"
                    unlisted.setdefault(version, []).extend([] if turn["api_name"] in tools else [task_id])
                    user = "**Dialogue Records History**\n" + "\n".join(said[:i]) + (
                        "\n<user> Make the one tool call that comes next. </user>")
                    yield Task(task_id, [
                        {"role": "system", "content": _SYSTEM.format(tools=_listing(tools))},
                        {"role": "user", "content": user}],
                        data={"name": turn["api_name"], "parameters": turn["param_dict"], "version": version,
                              "result": turn["result"]})

        if not unlisted:
            raise ValueError(f"{source}: no API turn in a dialogue of {', '.join(VERSIONS)} or level-3")
        self.notes["tool missing from the prompt"] = unlisted
        print(f"api-bank: the prompt lacks the tool in {', '.join(f'{len(n)} rows of {v}' for v, n in unlisted.items())}")

    def _tools(self, version: str, turns: list[dict], before: list[dict]) -> dict[str, dict]:
        names = dict.fromkeys(t["api_name"] for t in turns if t["role"] == "API") if version == "v1" else ["ToolSearcher"]
        known = {name: self.checkout.describe(name) for name in names}
        for turn in before:
            if turn["role"] == "API" and turn["api_name"] == "ToolSearcher":
                output = turn["result"].get("output")
                found = output if isinstance(output, list) else [output]
                known |= {t["name"]: t for t in found if isinstance(t, dict) and "name" in t}
        return known


class Checkout:
    """Upstream's tool manager in a process of its own, in a copy of its folder, with no network and nothing else to write."""

    def __init__(self, folder: Path, timeout: float):
        self.folder, self.timeout, self._process, self._known = folder.resolve(), timeout, None, {}
        self._missing, self._v3 = [], []        # packages; requests that v3's managers have seen

    def judge(self, version: str, call: dict, gold: dict) -> tuple[bool, str]:
        """(right, what happened)."""
        key = json.dumps([version, call["name"], call["parameters"], gold["name"], gold["result"]], sort_keys=True, default=str)
        if version.startswith("v3") or key not in self._known:      # v3 keeps one manager: a call may change the next
            self._known[key] = self._ask({"version": version, "name": call["name"], "parameters": call["parameters"],
                                          "gold_name": gold["name"], "gold_result": gold["result"]})
        return self._known[key]["correct"], self._known[key]["detail"]

    def describe(self, name: str) -> dict[str, Any]:
        """Description and input_parameters of a tool, {} where upstream has none."""
        if name not in self._known:
            self._known[name] = self._ask({"describe": name}).get("tool", {})
        return self._known[name]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._copy.cleanup()

    def _ask(self, request: dict) -> dict[str, Any]:
        for _ in range(2):      # a process that is dead already says nothing about this call
            if self._process is None:
                self._start()
            try:
                self._send(request)
                break
            except OSError:
                self.close()
        answer = self._answer(self.timeout) if self._process else None
        if answer is None:      # what a call hangs or dies in costs that call alone
            self.close()
            return {"correct": False, "detail": f"the call ended upstream's process, or took over {self.timeout:g} s"}
        if request.get("version", "").startswith("v3"):
            self._v3.append(request)
        return answer

    def _send(self, request: dict) -> None:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, seconds: float) -> dict | None:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        return json.loads(line) if line else None

    def _start(self) -> None:
        self._copy = tempfile.TemporaryDirectory(prefix="corrgrpo-", ignore_cleanup_errors=True)
        copied = Path(self._copy.name, "api-bank")
        copied.mkdir()
        for name in ("apis", "init_database", "lv3_apis"):
            if (self.folder / name).is_dir():
                shutil.copytree(self.folder / name, copied / name)
        for file in self.folder.glob("*.py"):
            shutil.copy(file, copied)
        command = [sys.executable, "-P", "-s", "-B", str(Path(__file__).with_name("apibank_judge.py")), str(copied),
                   str(int(self.timeout) + 5)]
        self._process = subprocess.Popen([*sandbox.namespaces(), *command], cwd=copied, env={"HOME": str(copied)},
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         start_new_session=True)
        with self._process.stderr as errors:
            hello = self._answer(STARTUP)
            if hello is None or "error" in hello:
                os.killpg(self._process.pid, signal.SIGKILL)
                problem = hello["error"] if hello else errors.read().decode(errors="replace")[-500:].strip() or "it ended"
                self.close()
                raise ValueError(f"env.root: the api-bank checkout {self.folder} cannot be used: {problem}")
        if hello["missing"] != self._missing:
            self._missing = hello["missing"]
            print(f"api-bank: {', '.join(self._missing)} not installed: calls that need them count as wrong")
        for request in self._v3:    # a new process' managers have seen nothing
            self._send(request)
            self._answer(self.timeout)


def _listing(tools: dict[str, dict]) -> str:
    return "\n".join(f"{n}. Name: {name}\nDescription: {t.get('description', '')}\nParameters: "
                     f"{json.dumps(t.get('input_parameters', {}))}" for n, (name, t) in enumerate(tools.items(), 1))


def _line(call: dict) -> str:
    return json.dumps({"name": call["name"], "parameters": call["parameters"]})


def _said(turn: dict) -> str:
    if turn["role"] == "API":
        call = {"name": turn["api_name"], "parameters": turn["param_dict"]}
        return f"<tool_call>\n{_line(call)}\n</tool_call>\n<obs> {json.dumps(turn['result'].get('output'))} </obs>"
    tag = "user" if turn["role"] == "User" else "response"
    return f"<{tag}> {turn['text']} </{tag}>"


def _calls(block: str) -> list[dict]:
    """The readable calls up to the closing tag, one JSON object a line."""
    found = []
    for line in block.partition("</tool_call>")[0].strip().split("\n"):
        try:
            call = json.loads(line)
            tool.parse(line)
        except (ValueError, RecursionError):
            continue
        found.append(call)
    return found
