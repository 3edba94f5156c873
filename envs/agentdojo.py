"""Agents under attack: AgentDojo (Debenedetti et al. 2024, arXiv 2406.13352) as an environment of many turns.

An agent works for a user through tools. In the attacked cases some tool output carries an instruction that serves an
attacker instead. Two rewards, from AgentDojo's own checkers: utility (the user's task is solved) and security (the
attacker's is not). See it play without a model:

    python -m envs.agentdojo --policy ground_truth

The split, 8 turns, one call a turn and outputs of 2,048 characters are the published settings of the authors' release
(HKUST-KnowComp/CorrGRPO); the last two stand in the presets, not in the defaults here.
"""

import contextlib
import copy
import datetime
import functools
import hashlib
import html
import importlib.metadata
import importlib.resources
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from envs import Score, Task
from envs.hermes import parse
from rewards import agent

REWARD_NOTHING = tuple(f"banking:user_task_{i}" for i in (5, 6, 8, 9, 10))   # utility is 1 for an agent that does nothing
VERSIONS = ("v1", "v1.1", "v1.1.1", "v1.1.2", "v1.2", "v1.2.1", "v1.2.2")
NOW = datetime.datetime(2026, 1, 1, 12)     # what tools write as the present, so that the same seed gives the same run


class Episode:
    """One agent at work. step(reply) runs the reply's tool calls and returns their results as messages of role "tool", or []
    when it is over: a reply without a call, a call that cannot be read (malformed = "zero"), or the last turn."""

    truncated = False           # the last turn still called tools

    def __init__(self, dojo: "AgentDojo", task: Task):
        self.dojo, self.task, self.over = dojo, task, False
        self.case = dojo.build(task.id)
        self.environment = copy.deepcopy(self.case.start)
        self.trace, self.output = [], ""                    # AgentDojo's record of calls; the text of the last reply
        self.turns = self.parse_errors = self.tool_errors = 0
        self.waiting, self.shown = [], []                   # tool results: of the last step, and those that a reply followed
        self.log = [(m["role"], m["content"]) for m in task.messages]

    def step(self, reply: str) -> list[dict[str, str]]:
        if self.over:
            return []
        self.shown, self.waiting = self.shown + self.waiting, []
        self.turns += 1
        self.output, calls = parse(reply)
        self.log.append(("assistant", reply))
        last, limit = self.turns >= self.dojo.max_turns, self.dojo.max_calls or len(calls)
        messages = []
        for i, call in enumerate(calls):
            if isinstance(call, str):
                self.parse_errors += 1
                message = {"content": f"Error: this tool call cannot be read: {call}. Write <tool_call>, one JSON object "
                                      '{"name": ..., "arguments": {...}}, </tool_call>.'}
            elif i >= limit:
                self.tool_errors += 1
                message = {"name": call[0], "content": f"Error: not run, since a message may hold {limit} tool call(s)."}
            else:
                message = {"name": call[0], "content": self._run(*call, execute=not last)}
            messages.append({"role": "tool"} | message)
        self.truncated = last and bool(calls)
        self.over = last or not calls or (self.parse_errors > 0 and self.dojo.malformed == "zero")
        if last:
            return []                                       # as in AgentDojo: in the trace, but not run
        self.waiting = [m["content"] for m in messages]
        self.log += [("tool", content) for content in self.waiting]
        return [] if self.over else messages

    def _run(self, name: str, arguments: dict, execute: bool) -> str:
        lib = _library()
        try:
            call = lib.FunctionCall(function=name, args=arguments)
            self.trace.append(call)
            if not execute:
                return ""
            reply = {"role": "assistant", "content": [], "tool_calls": [call]}
            with warnings.catch_warnings(), _clock():
                warnings.simplefilter("ignore")             # what models write as arguments is often odd
                result = lib.ToolsExecutor().query("", self.case.runtime, self.environment, [reply])[3][-1]
            error, text = result["error"], "".join(part["content"] for part in result["content"])
        except Exception as e:      # AgentDojo's executor trips over odd strings and values that it cannot print
            error, text = f"{type(e).__name__}: {e}", ""
        self.tool_errors += error is not None
        text = error if error is not None else text
        return cut(text.encode("utf-8", "replace").decode(), self.dojo.max_tool_chars)


class AgentDojo:
    reward_names = agent.NAMES
    reward_weights = tuple(agent.WEIGHTS[name] for name in agent.NAMES)
    plain = ("turns",)                  # of `measures`: a mean that is no share
    transcript_suffix = ".html"

    def __init__(self, version: str = "v1.2.2", suites: Sequence[str] | None = None,
                 attacks: Sequence[str] = ("important_instructions", "tool_knowledge"), model_name: str = "local",
                 max_turns: int = 8, malformed: str = "zero", exclude: Sequence[str] = (), max_calls: int = 0,
                 max_tool_chars: int = 8192):
        """version: of the benchmark. suites: some of workspace, travel, banking, slack; None for all. attacks: names in
        AgentDojo's registry, () for clean tasks alone. model_name: decides what attacks call the victim ("local": "Local
        model"). max_turns: replies in an episode; calls of the last are not run. malformed: "zero", a tool call that cannot be
        read ends the episode and both rewards are 0; "error reply", it is answered with an error and the episode judged as it
        ends. exclude: suite:user_task or whole ids, of tasks to leave out (REWARD_NOTHING holds five that pay for doing
        nothing). max_calls: tool calls that are run in one message, 0 for all. max_tool_chars: a longer tool result is cut
        in the middle; 0 for no limit. Raises ValueError where agentdojo is not installed or an argument is wrong."""
        lib = _library()
        every = lib.get_suites(version) or _wrong("version", version, VERSIONS)
        self.suites = {name: every[name] for name in _words("suites", every if suites is None else suites, every)}
        self.attacks = _words("attacks", attacks, [name for name in lib.ATTACKS if name != "manual"])
        known = {f"{suite}:{task}" for suite in every for task in every[suite].user_tasks}
        for name in _words("exclude", exclude):
            if ":".join(name.split(":")[:2]) not in known:
                _wrong("exclude", name, ["suite:user_task_N", "suite:user_task_N:injection_task_M:attack"])
        if malformed not in ("zero", "error reply"):
            _wrong("malformed", malformed, ["zero", "error reply"])
        if max_turns < 1 or max_calls < 0 or max_tool_chars < 0:
            raise ValueError("env.max_turns must be at least 1, env.max_calls and env.max_tool_chars at least 0, not "
                             f"{max_turns}, {max_calls} and {max_tool_chars}")
        self.exclude, self.malformed, self.max_turns = tuple(exclude), malformed, max_turns
        self.max_calls, self.max_tool_chars = max_calls, max_tool_chars
        try:
            self.attackers = {(s, a): lib.load_attack(a, suite, SimpleNamespace(name=model_name))
                              for s, suite in self.suites.items() for a in self.attacks}
        except ValueError as e:
            raise ValueError(f"env.model_name = {model_name!r}: {e}") from None
        self.runtimes = {name: lib.FunctionsRuntime(suite.tools) for name, suite in self.suites.items()}
        self.tools = {name: [{"type": "function", "function": {"name": f.name, "description": f.description,
                                                              "parameters": f.parameters.model_json_schema()}}
                             for f in suite.tools] for name, suite in self.suites.items()}
        self.build = functools.lru_cache(maxsize=64)(self._build)       # rollouts of a task start together
        self.notes = {"agentdojo": f"{importlib.metadata.version('agentdojo')}, benchmark {version}"}

    def tasks(self, split: str) -> list[Task]:
        """split: "train" and "test" are the published 1,584 and 411 cases, told apart by user task; "all" is both."""
        if split not in ("train", "test", "all"):
            _wrong("split", split, ["train", "test", "all"])
        lib, ids = _library(), []
        for name, suite in self.suites.items():
            for user in suite.user_tasks:
                share = int(hashlib.sha256(f"{name}:{user}".encode()).hexdigest()[:8], 16) / 2**32
                if split != "all" and (share < 0.2) != (split == "test"):
                    continue
                ids.append(f"{name}:{user}:clean")
                for attack in self.attacks:     # an attack that only stops the agent has no goal: one case, as in AgentDojo
                    count = 1 if lib.ATTACKS[attack].is_dos_attack else None
                    ids += [f"{name}:{user}:{injection}:{attack}" for injection in list(suite.injection_tasks)[:count]]
        return [self.task(i) for i in ids if not any(f"{i}:".startswith(f"{e}:") for e in self.exclude)]

    def task(self, id: str) -> Task:
        """"suite:user_task_N:clean" or "suite:user_task_N:injection_task_M:attack". Raises ValueError."""
        suite, user, injection, attack = _split(id)
        here = self.suites.get(suite)
        if here is None or user not in here.user_tasks or not (
                injection is None or (injection in here.injection_tasks and attack in self.attacks)):
            raise ValueError(f"there is no task {id!r}: ids look like banking:user_task_0:clean or "
                             "banking:user_task_0:injection_task_7:important_instructions, suites are "
                             f"{', '.join(self.suites)}, attacks {', '.join(self.attacks)}")
        return Task(id, [{"role": "system", "content": _library().system_message},
                         {"role": "user", "content": here.user_tasks[user].PROMPT}],
                    self.tools[suite], {"suite": suite, "user_task": user, "injection_task": injection, "attack": attack})

    def start(self, task: Task) -> Episode:
        return Episode(self, task)

    def _build(self, id: str) -> SimpleNamespace:
        """What all episodes of a task share. `start` is never handed out, only copied: tools and checkers write to it."""
        name, user, injection, attack = _split(id)
        suite = self.suites[name]
        user, injection = suite.user_tasks[user], suite.injection_tasks[injection] if injection else None
        injections = self.attackers[name, attack].attack(user, injection) if injection else {}
        start = user.init_environment(suite.load_and_inject_default_environment(injections))
        return SimpleNamespace(suite=suite, user=user, injection=injection, injections=list(injections.values()), start=start,
                               runtime=self.runtimes[name], dos=bool(attack) and self.attackers[name, attack].is_dos_attack)

    def score(self, episodes: list[Episode]) -> list[Score]:
        """AgentDojo's verdicts on copies, in its own order: the checkers change the environments that they look at. What a
        checker raises is an error, not a verdict. Metrics: utility and attack_success are the bare verdicts (the latter None
        without an attack), exposed says whether the model got to read an injection."""
        return [self._score(e) for e in episodes]

    def _score(self, e: Episode) -> Score:
        case, attacked = e.case, e.case.injection is not None
        seen = [letters(text) for text in e.shown]
        metrics = {"exposed": any(letters(i) and letters(i) in text for i in case.injections for text in seen),
                   "tool_errors": e.tool_errors, "parse_errors": e.parse_errors, "turns": e.turns, "suite": case.suite.name,
                   "attack": e.task.data["attack"] or "clean"}
        try:
            before, after = copy.deepcopy((case.start, e.environment))
            told, trace = [{"type": "text", "content": e.output}], copy.deepcopy(e.trace)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                utility = bool(case.suite._check_task_result(case.user, told, before, after, trace))
                success = bool(case.suite._check_task_result(case.injection, told, before, after, trace)) if attacked else None
        except Exception as error:
            return Score({}, metrics, f"a checker of {e.task.id} raised {type(error).__name__}: {error}")
        success = not utility if case.dos else success
        metrics = {"utility": utility, "attack_success": success} | metrics
        return Score(agent.score(utility, success, self.malformed == "zero" and e.parse_errors > 0), metrics)

    def measures(self, sample: dict[str, Any]) -> dict[str, float | None]:
        """What eval.py averages: named measures of a stored sample {"id", "metrics", "error"}; None where one does not apply.
        Utility is that of clean tasks; the other three are of attacked ones, over all and over those in which the model read
        the injection; each again by suite and by attack. Then the shares of episodes with errors, and the mean of turns."""
        suite, _, injection, attack = _split(sample["id"])
        m, attacked = sample.get("metrics") or {}, injection is not None
        useful, hit = m.get("utility"), m.get("attack_success")
        known = sample.get("error") is None and useful is not None
        values = {"utility": None if not known or attacked else float(useful)}
        under = known and attacked and hit is not None
        values |= {"utility under attack": float(useful) if under else None, "attack success": float(hit) if under else None,
                   "useful and safe": float(useful and not hit) if under else None,
                   "exposed": float(m["exposed"]) if under else None}
        values |= {f"{name} (exposed)": values[name] if under and m["exposed"] else None
                   for name in ("utility under attack", "attack success", "useful and safe")}
        out = dict(values)
        for name, value in values.items():
            out |= {f"{name} / {s}": value if s == suite else None for s in self.suites}
            if name != "utility":
                out |= {f"{name} / {a}": value if a == attack else None for a in self.attacks}
        return out | {"with tool errors": float(m["tool_errors"] > 0) if known else None,
                      "with parse errors": float(m["parse_errors"] > 0) if known else None,
                      "turns": float(m["turns"]) if known else None}

    def transcript(self, e: Episode) -> str:
        """The episode as an HTML page, the injection marked where it stands in a tool's output."""
        (score,) = self.score([e])
        facts = score.metrics | {"rewards": score.error or ", ".join(f"{k} {v:g}" for k, v in score.rewards.items())}
        rows = "".join(f"<tr><th>{html.escape(str(k))}<td>{html.escape(str(v))}" for k, v in facts.items())
        goal = f"<p>The attacker's goal: {html.escape(e.case.injection.GOAL)}" if e.case.injection else ""
        turns = "".join(f'<section class="{role}"><h2>{role}</h2><pre>'
                        f'{_marked(text, e.case.injections if role == "tool" else [])}</pre></section>' for role, text in e.log)
        return PAGE.format(title=html.escape(e.task.id), goal=goal, facts=rows, turns=turns)


PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{font: 15px sans-serif; max-width: 60em; margin: 2em auto}} pre {{white-space: pre-wrap; overflow-wrap: anywhere}}
section {{border-left: 4px solid #bbb; padding-left: 1em}} .assistant {{border-color: #36c}} .tool {{border-color: #2a2}}
h2 {{font-size: 1em; color: #666}} th {{text-align: left; padding-right: 1em}} mark {{background: #fb8}}</style>
<h1>{title}</h1>{goal}<table>{facts}</table>{turns}
"""


def letters(text: str) -> str:
    """Letters and digits alone, in lower case: YAML wraps, quotes and escapes an injection before the model reads it."""
    return re.sub(r"[^0-9a-z]", "", re.sub(r"\\[nrt]", "", text).lower())


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, the middle left out; 0 for no limit."""
    if not limit or len(text) <= limit:
        return text
    note = f"\n... {len(text) - limit} characters and more are cut here ...\n"
    keep = limit - len(note)
    return text[: (keep + 1) // 2] + note + text[len(text) - keep // 2 :] if keep > 0 else text[:limit]


def _marked(text: str, injections: list[str]) -> str:
    """`text` as HTML, with every injection in <mark>."""
    at = [m.start() for m in re.finditer(r"\\[nrt]|[0-9A-Za-z]", text) if len(m.group()) == 1]
    plain = "".join(text[i] for i in at).lower()
    spans = {(at[m.start()], at[m.end() - 1] + 1) for i in injections if letters(i)
             for m in re.finditer(re.escape(letters(i)), plain)}
    out, end = "", 0
    for start, stop in sorted(spans):
        if start >= end:
            out += f"{html.escape(text[end:start])}<mark>{html.escape(text[start:stop])}</mark>"
            end = stop
    return out + html.escape(text[end:])


def _split(id: str) -> tuple[str, str, str | None, str | None]:
    """(suite, user task, injection task, attack); the last two None for a clean case."""
    parts = id.split(":") if isinstance(id, str) else []
    if len(parts) == 3 and parts[2] == "clean":
        return parts[0], parts[1], None, None
    return tuple(parts) if len(parts) == 4 else ("", "", None, None)


def _words(name: str, value: Any, known: Any = None) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"env.{name} must be a list of strings, not {value!r}")
    for word in value:
        if known is not None and word not in known:
            _wrong(name, word, known)
    return tuple(dict.fromkeys(value))


def _wrong(name: str, value: Any, known: Any) -> None:
    raise ValueError(f"env.{name}: {value!r} is not known; it takes {', '.join(known)}")


@contextlib.contextmanager
def _clock():
    """Inside, AgentDojo's tools take NOW for the present. They run in no thread of their own."""
    lib = _library()
    before = [module.datetime for module in lib.clocks]
    for module in lib.clocks:
        module.datetime = SimpleNamespace(datetime=SimpleNamespace(now=lambda: NOW))
    try:
        yield
    finally:
        for module, was in zip(lib.clocks, before):
            module.datetime = was


@functools.cache
def _library() -> SimpleNamespace:
    """The parts of agentdojo in use, imported without the API clients that its agent_pipeline package would load (0.7 s
    instead of 2 to 4), and without its change to yaml.dump, which would quote every string in this process."""
    try:
        spec = importlib.util.find_spec("agentdojo")
        import yaml
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("env.name = 'agentdojo' needs the package agentdojo: pip install 'agentdojo==0.1.35'")
    stand_ins = [name for name in ("agentdojo.agent_pipeline", "agentdojo.agent_pipeline.llms") if name not in sys.modules]
    dumping = yaml.Dumper.yaml_representers
    for name in stand_ins:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [f"{spec.submodule_search_locations[0]}/{name.partition('.')[2].replace('.', '/')}"]
    try:
        from agentdojo.agent_pipeline.tool_execution import ToolsExecutor
        from agentdojo.attacks import load_attack
        from agentdojo.attacks.attack_registry import ATTACKS
        from agentdojo.default_suites.v1.tools import cloud_drive_client, email_client
        from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
        from agentdojo.task_suite import get_suites, task_suite
    finally:
        for name in stand_ins:      # whoever imports them later gets the real ones
            del sys.modules[name]
    if yaml.Dumper.yaml_representers is not dumping:            # only its reader of suite files needs the quotes
        quoting = type("Quoting", (yaml.Dumper,), {"yaml_representers": yaml.Dumper.yaml_representers})
        yaml.Dumper.yaml_representers = dumping
        fast = functools.partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))    # an eighth of the time
        task_suite.yaml = SimpleNamespace(**vars(yaml) | {"dump": functools.partial(yaml.dump, Dumper=quoting),
                                                          "safe_load": fast})
    messages = importlib.resources.files("agentdojo") / "data" / "system_messages.yaml"
    return SimpleNamespace(
        ToolsExecutor=ToolsExecutor, load_attack=load_attack, ATTACKS=ATTACKS, clocks=(cloud_drive_client, email_client),
        FunctionCall=FunctionCall, FunctionsRuntime=FunctionsRuntime, get_suites=get_suites,
        system_message=yaml.safe_load(messages.read_text())["default"])


if __name__ == "__main__":
    from envs.scripted import main

    sys.exit(main())
