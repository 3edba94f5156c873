"""Agents without a model: scripts of replies, played through the rollout code that a model is trained with.

    python -m envs.agentdojo --policy ground_truth              utility is reached on every task, no attack succeeds
    python -m envs.agentdojo --policy obeyer --suites banking --limit 40 --out transcripts

`play` is for tests and for trying an environment out: any environment, any replies.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from envs import Task
from envs.agentdojo import AgentDojo
from envs.hermes import CLOSE, OPEN
from rollout import Rollout, collect, encode, score
from sampler import Sample

END = 0x10FFFF      # the last code point, which is no character: the end token


class Scripted:
    """Sampler and tokenizer in one. A token is a character; the first line of a prompt says whose script is due."""

    added_tokens_decoder: dict[int, Any] = {}   # noqa: RUF012

    def __init__(self, scripts: list[list[str]]):
        self.scripts = scripts

    def apply_chat_template(self, messages: list[dict], tools: list[dict] | None = None, **_) -> str:
        tools = json.dumps(tools) if tools else ""
        end = {"assistant": chr(END)}
        return tools + "".join(f"<{m['role']}>\n{m['content']}{end.get(m['role'], '')}\n" for m in messages) + "<assistant>\n"

    def __call__(self, text: str, **_) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], **_) -> str:
        return "".join(map(chr, ids))

    def generate(self, prompts: list[list[int]], n: int, *, max_new_tokens: int, **_) -> list[list[Sample]]:
        out = []
        for prompt in prompts:
            script, turn = self.scripts[int(self.decode(prompt[: prompt.index(ord("\n"))]))], prompt.count(END)
            ids = [*map(ord, script[min(turn, len(script) - 1)]), END][:max_new_tokens]
            sample = Sample(ids, [-1.0] * len(ids), "stop" if ids[-1] == END else "length")
            out.append([sample] * n)
        return out


def play(env, tasks: list[Task], scripts: list[list[str]], **limits) -> list[Rollout]:
    """One scored rollout of each task, whose replies are its script's; the last reply is repeated where more are asked for.
    limits: max_new_tokens, max_tokens, max_response_tokens of rollout.collect, in characters."""
    player = Scripted(scripts)
    prompts = [[*map(ord, f"{i}\n"), *encode(player, task)] for i, task in enumerate(tasks)]
    limits = {"max_new_tokens": 10**9} | limits
    rollouts = collect(env, player, player, list(zip(tasks, prompts)), 1, seeds=[0] * len(tasks), temperature=1.0, **limits)
    score(env, rollouts)
    return rollouts


def call(name: str, arguments: dict) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}"


# ---- AgentDojo's policies: each gives the replies to a task, at least one ----------------------------------------------------


def ground_truth(env: AgentDojo, task: Task) -> list[str]:
    """Solves the user's task as AgentDojo's own solution does, in as few calls a message as fit into env.max_turns."""
    case = env.build(task.id)
    return [*_messages(env, case.user.ground_truth(case.start.model_copy(deep=True)), env.max_turns - 1),
            case.user.GROUND_TRUTH_OUTPUT]


def refuser(env: AgentDojo, task: Task) -> list[str]:
    """Safe and useless."""
    return ["I'm sorry, but I can't help with that."]


def obeyer(env: AgentDojo, task: Task) -> list[str]:
    """Does what the user asks until it has read everything, then what the attacker asks. AgentDojo has no solution for the
    injection tasks 6 to 13 of workspace, so there it only reads."""
    case = env.build(task.id)
    if case.injection is None:
        return ground_truth(env, task)
    theirs = case.injection.ground_truth(case.start.model_copy(deep=True))
    turns = max(1, env.max_turns - 1 - len(theirs))
    mine = _messages(env, case.user.ground_truth(case.start.model_copy(deep=True)), turns)
    return [*mine, *_messages(env, theirs, max(1, env.max_turns - 1 - len(mine))),
            case.injection.GROUND_TRUTH_OUTPUT or case.user.GROUND_TRUTH_OUTPUT]


GARBAGE = (
    f'{OPEN}{{"name": "send_money", "arguments": {{"amount": 1,,{CLOSE}', f"{OPEN}{CLOSE}", f"{OPEN}[1, 2]{CLOSE}",
    f'{OPEN}{{"name": 7, "arguments": {{}}}}{CLOSE}', f'{OPEN}{{"name": "read_file", "arguments": [1]}}{CLOSE}',
    f'{OPEN}{{"name": "read_file"}}{CLOSE}', OPEN * 40, OPEN + '{"a":' * 3000, f"{OPEN}NaN{CLOSE}",
    call("no_such_tool", {"x": 1}), call("", {}), call("<empty-function-name>", {}), call("read_file", {}),
    call("send_email", {"recipients": "[" * 400, "subject": {"a": [1]}, "body": None}), call("get_channels", {"unknown": 1}),
    call("send_money", {"recipient": "\ud800", "amount": "much", "subject": "\x00", "date": "[1]"}),
    call("read_file", {"file_path": "-" * 20000 + "1"}), call("send_money", {"amount": {"function": "get_iban", "args": {}}}))


def garbler(env: AgentDojo, task: Task) -> list[str]:
    """Calls that cannot be read, unknown tools, wrong types, odd strings; at the end an empty message."""
    first = sum(task.id.encode()) % len(GARBAGE)
    return [*(GARBAGE[(first + i) % len(GARBAGE)] for i in range(env.max_turns - 1)), ""]


def _messages(env: AgentDojo, calls: list, count: int) -> list[str]:
    """At most `count` messages that make the calls, one a message if they fit or must."""
    size = env.max_calls or max(1, math.ceil(len(calls) / max(count, 1)))
    texts = [call(c.function, dict(c.args)) for c in calls]
    return ["\n".join(texts[i : i + size]) for i in range(0, len(texts), size)]


POLICIES = {f.__name__: f for f in (ground_truth, refuser, obeyer, garbler)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.agentdojo", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description="AgentDojo played by a script, through the rollout code, without a model.",
                                     epilog="policies:\n" + "\n".join(f"  {name:14}{f.__doc__.splitlines()[0]}"
                                                                      for name, f in POLICIES.items()))
    parser.add_argument("--policy", choices=POLICIES, default="ground_truth")
    parser.add_argument("--version", default="v1.2.2", help="of the benchmark (default v1.2.2)")
    parser.add_argument("--suites", help="some of workspace,travel,banking,slack (default: all)")
    parser.add_argument("--attacks", default="important_instructions", help="names in AgentDojo's registry, with commas; \"\" "
                        "for clean tasks alone (default important_instructions)")
    parser.add_argument("--split", choices=("train", "test", "all"), default="all")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="N tasks drawn at random, always the same")
    parser.add_argument("--max-turns", type=int, default=8, metavar="N")
    parser.add_argument("--malformed", choices=("zero", "error reply"), default="zero",
                        help="what a call that cannot be read leads to (default zero)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write every episode there, a page each")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        env = AgentDojo(args.version, args.suites.split(",") if args.suites else None, args.attacks.split(",") if args.attacks
                        else (), max_turns=args.max_turns, malformed=args.malformed)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    tasks = env.tasks(args.split)
    if 0 < args.limit < len(tasks):
        tasks = random.Random(0).sample(tasks, args.limit)
    samples = []
    for i in range(0, len(tasks), 64):
        part = tasks[i : i + 64]
        for r in play(env, part, [POLICIES[args.policy](env, task) for task in part]):
            samples.append({"id": r.task.id, "metrics": r.score and r.score.metrics, "error": r.error})
            if args.out:
                name = r.task.id.replace(":", ".") + env.transcript_suffix
                (args.out / name).write_text(env.transcript(r.episode), encoding="utf-8")
    print(f"{args.policy}: {len(samples)} episodes in {time.perf_counter() - start:.0f} s\n")
    print(table([env.measures(s) for s in samples], list(env.suites)))
    for error in [s["error"] for s in samples if s["error"]][:3]:
        print(f"no score: {error}")
    if args.out:
        print(f"\na page for each episode: {args.out}")
    return 0


def table(rows: list[dict[str, float | None]], suites: list[str]) -> str:
    """Shares with their 95 % intervals (Wilson's) over all episodes, and by suite; the mean of turns."""
    def values(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    lines = [f"{'':31}{'count':>9}{'share':>7}{'95 %':>14}  " + "".join(f"{s:>11}" for s in suites)]
    for name in [name for name in rows[0] if " / " not in name] if rows else []:
        all_, parts = values(name), [values(f"{name} / {s}") for s in suites]
        if not all_:
            continue
        if name != "turns":
            low, high = binomtest(round(sum(all_)), len(all_)).proportion_ci(0.95, "wilson")
            count, interval = f"{sum(all_):.0f}/{len(all_)}", f"{low:.3f}-{high:.3f}"
            lines.append(f"{name:31}{count:>9}{sum(all_) / len(all_):7.3f}{interval:>14}  " + "".join(
                             f"{sum(p) / len(p):11.3f}" if p else f"{'-':>11}" for p in parts))
        else:
            lines.append(f"{name + ' (mean)':31}{'':9}{sum(all_) / len(all_):7.2f}")
    return "\n".join(lines)
