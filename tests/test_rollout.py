import copy

import pytest

from envs import Task
from rollout import collect, continuation, encode, score
from sampler import TransformersSampler
from tests.toy import Toy


@pytest.fixture
def sampler(tiny):
    import torch

    return TransformersSampler(tiny, set(range(2, 49152, 7)), torch.float32, 64)


def run(env, sampler, tokenizer, tasks, n=4, **kwargs):
    rollouts = collect(env, sampler, tokenizer, [(t, encode(tokenizer, t)) for t in tasks], n, seeds=list(range(len(tasks))),
                       max_new_tokens=8, temperature=1.0, **kwargs)
    score(env, rollouts)
    return rollouts


def test_several_turns_append_tokens_and_train_only_on_what_was_sampled(sampler, embedded):
    tokenizer = copy.deepcopy(embedded[1])
    seen = []
    generate = sampler.generate
    sampler.generate = lambda prompts, n, **kw: seen.append(prompts) or generate(prompts, n, **kw)
    rollouts = run(Toy(turns=3), sampler, tokenizer, Toy().tasks("train")[:2])
    for r in rollouts:
        assert len(r.ids) == len(r.trained) == len(r.log_probs) and len(r.replies) == 3
        assert all((lp != 0.0) == own for lp, own in zip(r.log_probs, r.trained))
        for turn in seen[1:]:                           # each later prompt is a prefix of the final tokens: nothing re-rendered
            assert any((r.prompt + r.ids)[: len(p)] == p for p in turn)
        masked = tokenizer.decode([i for i, own in zip(r.ids, r.trained) if not own])
        assert "turn 1" in masked and "turn 2" in masked and masked.endswith("<|im_start|>assistant\n")
    assert rollouts == sorted(rollouts, key=lambda r: r.group) and len({r.group for r in rollouts}) == 2


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("eos_token", ["<|im_end|>", "<|endoftext|>"])
def test_the_continuation_is_what_the_template_would_have_written(embedded, ended, eos_token):
    """Also where the token that ends a turn is not the tokenizer's eos_token (Gemma, Phi)."""
    tokenizer = copy.deepcopy(embedded[1])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>") if ended else None
    tokenizer.eos_token = eos_token
    first = [{"role": "user", "content": "a"}]
    new = [{"role": "user", "content": "now b"}]
    whole = tokenizer.apply_chat_template([*first, {"role": "assistant", "content": "reply"}, *new], tokenize=False,
                                          add_generation_prompt=True)
    start = tokenizer.apply_chat_template(first, tokenize=False, add_generation_prompt=True) + "reply"
    text = start + ("<|im_end|>" if ended else "") + tokenizer.decode(continuation(tokenizer, new, end))
    assert text == whole


def test_an_episode_ends_where_the_next_turn_would_not_fit(sampler, embedded):
    rollouts = run(Toy(turns=9), sampler, embedded[1], Toy().tasks("train")[:1], max_tokens=100)
    assert all(len(r.prompt) + len(r.ids) <= 100 and 1 < len(r.replies) < 9 for r in rollouts)
    assert all(r.finish_reason == "length" for r in rollouts)


def test_the_same_task_twice_makes_two_groups(sampler, embedded):
    task = Toy().tasks("train")[0]
    rollouts = run(Toy(), sampler, embedded[1], [task, task])
    assert [r.group for r in rollouts] == [0] * 4 + [1] * 4
    assert [r.ids for r in rollouts[:4]] != [r.ids for r in rollouts[4:]]


@pytest.mark.parametrize("data, words", [
    ("raises in start", "cannot start"), ("raises in step", "the environment broke"), ("raises in score", "cannot score"),
    ("no score", "the sandbox died"), ("nan", "'vowels' is nan"), ("none", "score returned None"),
    ("no such reward", "KeyError: 'vowels'"), ("no content", "content")])
def test_what_cannot_be_scored_costs_no_other_rollout(sampler, embedded, data, words):
    good, bad = Toy().tasks("train")[:2]
    bad.data = data
    rollouts = run(Toy(), sampler, embedded[1], [good, bad])
    assert all(r.error is None and r.score.rewards["length"] >= 0 for r in rollouts[:4])
    assert all(words in r.error for r in rollouts[4:])


def test_the_prompt_has_its_special_tokens_once(embedded):
    ids = encode(embedded[1], Task("a", [{"role": "user", "content": "hi"}]))
    assert embedded[1].decode(ids).count("<|im_start|>") == 3 and ids.count(1) == 3
