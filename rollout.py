"""Drives an environment's episodes with a sampler: one turn or many, then scores them.

What was sampled is what is trained: a turn's ids are appended as they came, the environment's messages are tokenised once
and appended with `trained` False, and history is never rendered again.
"""

import math
import traceback
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from envs import Score, Task
from sampler import stream


@dataclass
class Rollout:
    task: Task
    group: int                                              # made at sampling time: the same task twice is two groups
    prompt: list[int]
    ids: list[int] = field(default_factory=list)            # everything after the prompt
    trained: list[bool] = field(default_factory=list)       # of each id: True where sampled, False where the environment's
    log_probs: list[float] = field(default_factory=list)    # the sampler's; 0.0 where the environment's
    replies: list[str] = field(default_factory=list)        # the text of each turn
    finish_reason: str = "stop"                             # of the last turn
    episode: Any = None
    score: Score | None = None
    error: str | None = None                                # why there is no score
    advantage: float = 0.0
    live: bool = False                                      # some reward varies in its group


def encode(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[int]:
    """The prompt's tokens. The template writes its own special tokens, so none are added."""
    text = tokenizer.apply_chat_template(task.messages, tools=task.tools, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def continuation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ended: bool) -> list[int]:
    """The tokens that follow a reply: the rest of its turn, the new messages, the head of the next reply.

    ended: the reply closed its own turn with an end token. Found by rendering a stand-in conversation, since templates can
    rewrite earlier turns; the text after the stand-in reply is what is appended.
    """
    marker = "\u2402reply\u2402"
    stand_in = [{"role": "user", "content": "."}, {"role": "assistant", "content": marker}]
    text = tokenizer.apply_chat_template(stand_in + messages, tokenize=False, add_generation_prompt=True)
    tail = text.rpartition(marker)[2]
    if ended and tokenizer.eos_token and tail.startswith(tokenizer.eos_token):
        tail = tail[len(tokenizer.eos_token) :]
    return tokenizer(tail, add_special_tokens=False)["input_ids"]


def collect(env, sampler, tokenizer: PreTrainedTokenizerBase, tasks: list[tuple[Task, list[int]]], n: int, *,
            seeds: list[int], max_new_tokens: int, temperature: float, max_tokens: int | None = None,
            progress=lambda done: None) -> list[Rollout]:
    """n rollouts of every task, in order, not scored yet. tasks: (task, its prompt's tokens); seeds: one a task.

    max_new_tokens: of a turn; max_tokens: of prompt and everything after it, None for no limit. An episode ends when the
    environment has nothing to say, or the next turn would not fit.
    """
    rollouts = [Rollout(task, group, prompt) for group, (task, prompt) in enumerate(tasks)
                for _ in range(n)]
    for r in rollouts:
        _guarded(r, lambda r=r: setattr(r, "episode", env.start(r.task)))
    active, turn = rollouts, 0
    while active:
        if turn == 0:
            batches = sampler.generate([prompt for _, prompt in tasks], n, max_new_tokens=max_new_tokens,
                                       temperature=temperature, seeds=seeds, progress=progress)
            samples = [sample for group in batches for sample in group]
        else:
            own = [stream(seeds[r.group], turn, i) for i, r in enumerate(rollouts) if r in active]
            samples = [group[0] for group in sampler.generate(
                [r.prompt + r.ids for r in active], 1, max_new_tokens=max_new_tokens, temperature=temperature, seeds=own)]
        going = []
        for r, sample in zip(active, samples, strict=True):
            r.ids += sample.ids
            r.log_probs += sample.log_probs
            r.trained += [True] * len(sample.ids)
            r.finish_reason = sample.finish_reason
            text = sample.ids[:-1] if sample.finish_reason == "stop" else sample.ids
            r.replies.append(tokenizer.decode(text, skip_special_tokens=True))
            messages = _guarded(r, lambda r=r: r.episode.step(r.replies[-1])) if r.error is None else None
            if not messages:
                continue
            new = continuation(tokenizer, messages, ended=sample.finish_reason == "stop")
            if max_tokens is None or len(r.prompt) + len(r.ids) + len(new) + max_new_tokens <= max_tokens:
                r.ids += new
                r.log_probs += [0.0] * len(new)
                r.trained += [False] * len(new)
                going.append(r)
        active, turn = going, turn + 1
    return rollouts


def score(env, rollouts: list[Rollout]) -> None:
    """Fills in `score` or `error`. A scorer that raises costs the rollouts it cannot score, not the batch."""
    whole = [r for r in rollouts if r.error is None]
    try:
        scores = env.score([r.episode for r in whole])
        if len(scores) != len(whole):
            raise ValueError(f"{type(env).__name__}.score returned {len(scores)} scores for {len(whole)} episodes")
    except Exception:
        scores = [_guarded(r, lambda r=r: env.score([r.episode])[0]) for r in whole]
    for r, s in zip(whole, scores):
        if s is None:
            continue
        r.score, r.error = s, s.error
        if r.error is None:
            wrong = [name for name in env.reward_names if not _number(s.rewards.get(name))]
            if wrong:
                r.error = f"reward {wrong[0]!r} is {s.rewards.get(wrong[0])!r}, not a finite number"


def _number(x: Any) -> bool:
    try:
        return math.isfinite(x)
    except TypeError:
        return False


def _guarded(r: Rollout, f):
    try:
        return f()
    except Exception as e:
        r.error = f"{type(e).__name__}: {e}\n{traceback.format_exc(limit=-3)}"
        return None
