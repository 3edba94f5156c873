"""Many turns, in the chat formats of three model families: what is trained is what was sampled, and the model reads what its
own template would have written."""

import copy
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import policy
from envs import Score, Task
from rollout import _check, collect, encode, render
from sampler import Sample, TransformersSampler
from tests.families import TEMPLATES, tokenizer

TOOLS = [{"type": "function", "function": {"name": "get_balance", "description": "The balance.", "parameters": {
    "type": "object", "properties": {"account": {"type": "string"}}}}}]
TASK = Task("t", [{"role": "system", "content": "Help."}, {"role": "user", "content": "What is my balance?"}], TOOLS)
REPLIES = ('<think>\nthe tool\n</think>\n\n<tool_call>\n{"name": "get_balance", "arguments": {}}\n</tool_call>',
           "hello again", "The answer is 7.")
ANSWERS = ([{"role": "tool", "content": "7 euros"}, {"role": "tool", "content": "the second result"}],
           [{"role": "user", "content": "And now?"}], [])


class Dialogue:
    """Answers three replies, whatever they are: two tool results, a question, nothing."""

    reward_names, reward_weights = ("one",), (1.0,)

    def start(self, task):
        return Episode()

    def score(self, episodes):
        return [Score({"one": 1.0}) for _ in episodes]


class Episode:
    def __init__(self):
        self.turn = 0

    def step(self, reply):
        self.turn += 1
        return copy.deepcopy(list(ANSWERS[self.turn - 1]))


class Spelling:
    """Samples REPLIES, every text spelled byte by byte: no tokenizer would cut it like that."""

    def __init__(self, tok):
        self.tok, self.turn, self.prompts, self.samples = tok, 0, [], []

    def generate(self, prompts, n, *, max_new_tokens, temperature, seeds, progress=None):
        added = {t.content: i for i, t in self.tok.added_tokens_decoder.items()}
        text, ids = REPLIES[self.turn], []
        while text:
            tag = next((tag for tag in added if text.startswith(tag)), None)
            ids += [added[tag]] if tag else self.tok.convert_tokens_to_ids(self.tok.tokenize(text[0]))
            text = text[len(tag or text[0]):]
        ids.append(self.tok.eos_token_id)
        self.turn += 1
        self.prompts.append(prompts[0])
        self.samples.append(ids)
        return [[Sample(ids, [-1.0] * len(ids), "stop")]]


def without_thoughts(text):
    return text.replace("<think>\n\n</think>\n\n", "").replace("<think>\nthe tool\n</think>\n\n", "")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("family", TEMPLATES)
def test_the_model_reads_what_its_template_would_have_written_and_ids_stay_as_sampled(family, thinking):
    tok = tokenizer(family)
    if not thinking:
        tok.apply_chat_template = partial(tok.apply_chat_template, enable_thinking=False)
    sampler = Spelling(tok)
    (r,) = collect(Dialogue(), sampler, tok, [(TASK, encode(tok, TASK))], 1, seeds=[0], max_new_tokens=500, temperature=1.0)
    assert r.error is None and r.replies == list(REPLIES)       # tags too, where the tokenizer holds them for special tokens
    assert [t for t, own in zip(r.ids, r.trained) if own] == [t for ids in sampler.samples for t in ids]
    for prompt, sampled in zip(sampler.prompts, sampler.samples):
        assert (r.prompt + r.ids)[: len(prompt) + len(sampled)] == prompt + sampled
    messages = list(TASK.messages)
    for reply, answer, prompt in zip(REPLIES, ANSWERS, sampler.prompts):
        expected, read = render(tok, messages, TOOLS), tok.decode(prompt)
        if family == "qwen3":       # a template that drops thoughts of earlier turns cannot undo what was sampled after them
            expected, read = without_thoughts(expected), without_thoughts(read)
        assert read == expected
        messages += [{"role": "assistant", "content": reply}, *answer]
    if family == "qwen3" and not thinking:
        assert all(tok.decode(p).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for p in sampler.prompts)


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_template_shows_tools_and_keeps_the_results_of_one_message_in_one_turn(family):
    tok = tokenizer(family)
    text = render(tok, [*TASK.messages, {"role": "assistant", "content": "call"}, *ANSWERS[0]], TOOLS)
    system, _, rest = text.partition("<|im_end|>")
    assert "Help." in system and '"get_balance"' in system and text.count("<|im_start|>system") == 1
    assert "<|im_start|>user\n<tool_response>\n7 euros\n</tool_response>\n<tool_response>\nthe second result" in rest
    assert ("<tool_call>" in system) == (family == "chatml")    # the way to call is told where the template doesn't


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=TEMPLATES)
def real(request):
    tok = tokenizer(request.param)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tok), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tok.eos_token_id, initializer_range=0.2)).eval()
    ends = set(range(40, 120)) | {tok.eos_token_id}             # so many that an untrained model comes to an end
    return tok, model, TransformersSampler(model, ends, torch.float32, 8)


def sample(real, **limits):
    tok, _, sampler = real
    return collect(Dialogue(), sampler, tok, [(TASK, encode(tok, TASK))] * 2, 4, seeds=[1, 2], temperature=1.0,
                   **{"max_new_tokens": 12} | limits)


def test_log_probabilities_of_a_real_sampler_are_the_policys_over_all_turns(real):
    rollouts = sample(real)
    assert max(len(r.replies) for r in rollouts) == 3 and any(r.finish_reason == "stop" for r in rollouts)
    for r in rollouts:
        with torch.no_grad():
            ours = policy.log_probs(real[1], r.prompt, [r.ids])[torch.tensor(r.trained)]
        theirs = torch.tensor([lp for lp, own in zip(r.log_probs, r.trained) if own])
        assert torch.allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("limit", [1, 10, 40, 60])
def test_the_length_over_all_turns_is_a_limit_and_what_it_cuts_is_flagged(real, limit):
    free, cut = sample(real), sample(real, max_response_tokens=limit)
    for f, c in zip(free, cut):
        assert len(c.ids) <= limit and c.ids == f.ids[: len(c.ids)]
        assert c.finish_reason == ("length" if len(c.ids) < len(f.ids) else f.finish_reason)
        assert len(c.ids) == len(c.trained) == len(c.log_probs)


def test_a_token_that_was_not_sampled_is_never_trained_on(real):
    (r, *_) = sample(real)
    prompt, drawn = r.prompt, [t for t, own in zip(r.ids, r.trained) if own]
    _check(r, prompt + r.ids, drawn)
    for spoil in (lambda r: r.ids.__setitem__(0, r.ids[0] + 1), lambda r: r.trained.__setitem__(0, False),
                  lambda r: r.prompt.__setitem__(0, 5), lambda r: r.log_probs.pop()):
        spoiled = copy.deepcopy(r)
        spoil(spoiled)
        with pytest.raises(RuntimeError, match="not those that were sampled"):
            _check(spoiled, prompt + r.ids, drawn)


def test_an_episode_that_its_own_limit_ended_is_flagged(real):
    class Short(Dialogue):
        def start(self, task):
            episode = Episode()
            episode.turn, episode.truncated = 2, True
            return episode

    tok, _, sampler = real
    rollouts = collect(Short(), sampler, tok, [(TASK, encode(tok, TASK))], 2, seeds=[0], max_new_tokens=100, temperature=1.0)
    assert {r.finish_reason for r in rollouts} == {"length"} and all(len(r.replies) == 1 for r in rollouts)
