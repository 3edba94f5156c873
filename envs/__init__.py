"""Environments. One is a plain class with

    reward_names: tuple[str, ...]       the K components, in order
    reward_weights: tuple[float, ...]   their default weights; the config's env.reward_weights overrides them
    tasks(split) -> list[Task]
    start(task) -> episode              episode.step(reply) -> the environment's next messages, [] when it is over;
                                        an episode that a limit of its own ended may say so: episode.truncated = True
    score(episodes) -> list[Score]      a batch, so that programs run side by side

and, if it likes,

    notes                               a dict that is printed at the start and kept in the run folder's environment.json
    reference(task) -> str              a right reply: what a supervised warm start trains on (train.warm_start_steps), and
                                        what `eval.py --model references` answers
    measures(sample) -> dict            what eval.py averages, by name, of a record of samples.jsonl; None: does not count
    plain, averages                     names of measures that are no shares; {name: measures that it is the mean of}
    transcript(episode) -> str          an episode for people, in a file with the suffix `transcript_suffix`

Its constructor takes the keys of the config's [env] table as keyword arguments. Your own needs no edit here:
env.name = "my_package.my_module:MyEnv".
"""

import importlib
from dataclasses import dataclass, field
from typing import Any

EMBEDDED = {"leetcode": "envs.leetcode:LeetCode", "rlla": "envs.rlla:RLLA", "apibank": "envs.apibank:APIBank",
            "agentdojo": "envs.agentdojo:AgentDojo"}


@dataclass
class Task:
    id: str
    messages: list[dict[str, str]]          # role and content, content a plain string
    tools: list[dict] | None = None         # JSON schemas for the chat template
    data: Any = None                        # whatever scoring needs


@dataclass
class Score:
    rewards: dict[str, float]               # a number for each of reward_names, before weights
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None                # set: no score. The rollout is counted, logged and never trained on


class Episode:
    """An episode of a single reply."""

    def __init__(self, task: Task):
        self.task, self.reply = task, ""

    def step(self, reply: str) -> list[dict[str, str]]:
        self.reply = reply
        return []


def find(name: str) -> type:
    """The class of an embedded environment or of "module:Class". Raises ValueError that says what is wrong."""
    module, colon, attribute = EMBEDDED.get(name, name).partition(":")
    if not colon:
        raise ValueError(f"env.name = {name!r} is neither one of {', '.join(EMBEDDED)} nor of the form "
                         "'my_package.my_module:MyEnv'")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"env.name = {name!r}: {e}") from None
