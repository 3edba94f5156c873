"""Drives an environment's episodes with a sampler: one turn or many, then scores them.

What was sampled is what is trained: a turn's ids are appended as they came, the environment's messages are tokenised once
and appended with `trained` False, and history is never rendered again; `_check` holds every turn to that.
"""

import functools
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from envs import Score, Task, hermes
from sampler import Sample, stream

# Some tokenizers mark these as special; they are part of a reply's text all the same.
TEXT = {"<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"}
PROBE = {"type": "function", "function": {"name": "probe", "description": "Probes.",
                                          "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Rollout:
    task: Task
    group: int                                              # made at sampling time: the same task twice is two groups
    prompt: list[int]
    ids: list[int] = field(default_factory=list)            # everything after the prompt
    trained: list[bool] = field(default_factory=list)       # of each id: True where sampled, False where the environment's
    log_probs: list[float] = field(default_factory=list)    # the sampler's; 0.0 where the environment's
    replies: list[str] = field(default_factory=list)        # the text of each turn
    finish_reason: str = "stop"                             # "length" if a limit on tokens or turns cut a reply or the episode
    episode: Any = None
    score: Score | None = None
    error: str | None = None                                # why there is no score
    advantage: float = 0.0
    live: bool = False                                      # some reward varies in its group


def encode(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[int]:
    """The prompt's tokens. The template writes its own special tokens, so none are added. Not to be changed: tasks with the
    same prompt share the list."""
    return _tokens(tokenizer, render(tokenizer, task.messages, task.tools))


@functools.lru_cache(maxsize=256)
def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], tools: list[dict] | None = None) -> str:
    """The messages in the model's own chat format, with the head of the next reply. A template that knows nothing of tools
    gets their schemas as part of the system message and their results as the user's, in the Hermes format."""
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    if tools or any(m["role"] == "tool" for m in messages):
        alone = [{"role": "user", "content": "."}]
        try:
            knows = template(alone, tools=[PROBE]) != template(alone)
        except Exception:           # whatever a template raises on being given tools, it can't use them
            knows = False
        if not knows:
            messages, tools = hermes.as_text(messages, tools), None
    return template(messages, tools=tools)


def continuation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], end: int | None) -> list[int]:
    """The tokens that follow a reply: the rest of its turn, the new messages, the head of the next reply.

    end: the end token with which the reply closed its own turn, None if it was cut off. Found by rendering a stand-in
    conversation, since templates can rewrite earlier turns (Qwen3 drops thoughts); the text after the stand-in reply is
    what is appended.
    """
    marker = "\u2402reply\u2402"
    stand_in = [{"role": "user", "content": "."}, {"role": "assistant", "content": marker}]
    tail = render(tokenizer, stand_in + messages).partition(marker)[2]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return ids[1:] if ids[:1] == [end] else ids


def closing(tokenizer: PreTrainedTokenizerBase, end_ids: set[int]) -> int:
    """The end token that the chat template puts after a reply, the tokenizer's where it puts none."""
    first = continuation(tokenizer, [], None)[:1]
    return first[0] if first and first[0] in end_ids else tokenizer.eos_token_id


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> bool:
    """Whether the template itself writes the reply's opening <think> (Qwen3 Thinking), so that no sampled text has it."""
    return tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")


def collect(env, sampler, tokenizer: PreTrainedTokenizerBase, tasks: list[tuple[Task, list[int]]], n: int, *,
            seeds: list[int], max_new_tokens: int, temperature: float, max_tokens: int | None = None,
            max_response_tokens: int = 0, progress=lambda done: None) -> list[Rollout]:
    """n rollouts of every task, in order, not scored yet. tasks: (task, its prompt's tokens); seeds: one a task.

    max_new_tokens: of a turn; max_tokens: of prompt and everything after it, None for no limit; max_response_tokens: of
    everything after the prompt, 0 for no limit. An episode ends when the environment has nothing to say, or the next turn
    would not fit; it is scored as it stands.
    """
    rollouts = [Rollout(task, group, prompt) for group, (task, prompt) in enumerate(tasks)
                for _ in range(n)]
    for r in rollouts:
        r.episode = _guarded(r, env.start, r.task)
    opening = ["<think>" if opens_thinking(tokenizer, prompt) else "" for _, prompt in tasks]
    hidden = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in TEXT}
    options = {"max_new_tokens": min(max_new_tokens, max_response_tokens or max_new_tokens), "temperature": temperature}
    sampled: list[list[int]] = [[] for _ in rollouts]
    active, turn = list(enumerate(rollouts)), 0
    while active:
        prompts = [r.prompt + r.ids for _, r in active]
        if turn == 0:
            groups = sampler.generate([prompt for _, prompt in tasks], n, seeds=seeds, progress=progress, **options)
        else:
            groups = sampler.generate(prompts, 1, seeds=[stream(seeds[r.group], turn, i) for i, r in active], **options)
        going = []
        for (i, r), prompt, sample in zip(active, prompts, [s for group in groups for s in group], strict=True):
            if max_response_tokens and len(sample.ids) > (room := max_response_tokens - len(r.ids)):
                sample = Sample(sample.ids[:room], sample.log_probs[:room], "length")
            r.ids += sample.ids
            r.log_probs += sample.log_probs
            r.trained += [True] * len(sample.ids)
            stopped = sample.finish_reason == "stop"
            text = [t for t in (sample.ids[:-1] if stopped else sample.ids) if t not in hidden]
            r.replies.append(opening[r.group] + tokenizer.decode(text))
            if not stopped:
                r.finish_reason = "length"
            sampled[i] += sample.ids
            if r.error is not None:
                continue
            messages = _guarded(r, r.episode.step, r.replies[-1])
            if getattr(r.episode, "truncated", False):
                r.finish_reason = "length"
            new = messages and _guarded(r, continuation, tokenizer, messages, sample.ids[-1] if stopped else None)
            fits = new and not (
                (max_tokens is not None and len(r.prompt) + len(r.ids) + len(new) + max_new_tokens > max_tokens)
                or (max_response_tokens and len(r.ids) + len(new) >= max_response_tokens))
            if fits:
                r.ids += new
                r.log_probs += [0.0] * len(new)
                r.trained += [False] * len(new)
                going.append((i, r))
            elif new:
                r.finish_reason = "length"
            _check(r, prompt + sample.ids, sampled[i])
        active, turn = going, turn + 1
    return rollouts


def _check(r: Rollout, known: list[int], sampled: list[int]) -> None:
    """What is trained is what was sampled: the tokens go on from those that the sampler was given and returned last, and the
    ones marked as trained are those that it drew, each with its log-probability."""
    if (r.prompt + r.ids)[: len(known)] != known or not len(r.ids) == len(r.trained) == len(r.log_probs) or (
            [t for t, own in zip(r.ids, r.trained) if own] != sampled):
        raise RuntimeError(f"task {r.task.id}: the tokens to train on are not those that were sampled; this is a fault of "
                           "the sampler or of rollout.py, so nothing is trained on them")


def replay(env, task: Task, group: int, replies: list[str]) -> Rollout:
    """An episode with replies that are known already, not scored yet."""
    r = Rollout(task, group, [], replies=replies)
    r.episode = _guarded(r, env.start, task)
    for reply in replies:
        if r.error is None:
            _guarded(r, r.episode.step, reply)
    return r


def score(env, rollouts: list[Rollout]) -> None:
    """Fills in `score` or `error`. A scorer that raises costs the rollouts it cannot score, not the batch."""
    whole = [r for r in rollouts if r.error is None]
    try:
        scores = env.score([r.episode for r in whole])
        if len(scores) != len(whole):
            raise ValueError(f"{type(env).__name__}.score returned {len(scores)} scores for {len(whole)} episodes")
    except Exception:
        scores = [(_guarded(r, env.score, [r.episode]) or [None])[0] for r in whole]
    for r, s in zip(whole, scores, strict=True):
        if r.error is None:
            _guarded(r, _take, r, s, env.reward_names)


def _take(r: Rollout, s: Score, names: tuple[str, ...]) -> None:
    if not isinstance(s, Score):
        raise TypeError(f"score returned {s!r} where a Score was due")
    if s.error is None:
        s.rewards = {name: float(s.rewards[name]) for name in names}      # plain floats, whatever they came as
        for name, value in s.rewards.items():
            if not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value}, not a finite number")
    r.score, r.error = s, s.error


def _guarded(r: Rollout, f: Callable, *args):
    """f(*args); what it raises becomes the rollout's error, and None is returned."""
    try:
        return f(*args)
    except Exception as e:
        r.error = f"{type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"
        return None
