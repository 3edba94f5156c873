import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import config
import policy
import train
from sampler import SamplerError, TransformersSampler, _draw, choose, stream, sync

PROMPTS = [[11, 500, 3, 42, 7, 9, 100, 200], [5], [1000, 2, 77]]


def sampler_of(model, eos=frozenset({2}), dtype=torch.float32, batch_size=64):
    return TransformersSampler(model, set(eos), dtype, batch_size)


def generate(sampler, prompts, n=3, seeds=None, temperature=1.0, max_new_tokens=12):
    return sampler.generate(prompts, n, max_new_tokens=max_new_tokens, temperature=temperature,
                            seeds=seeds or list(range(len(prompts))))


def test_a_prompt_gets_the_same_samples_alone_and_in_any_batch(tiny):
    """Padding, batch size, row compaction and the other prompts change nothing."""
    eos = set(range(0, 49152, 3))                   # a third of all tokens end a reply: rows leave all the time
    together = generate(sampler_of(tiny, eos), PROMPTS, n=8)
    for i, prompt in enumerate(PROMPTS):
        for other in (generate(sampler_of(tiny, eos), [prompt], n=8, seeds=[i])[0],
                      generate(sampler_of(tiny, eos, batch_size=8), PROMPTS, n=8)[i]):
            assert [s.ids for s in other] == [s.ids for s in together[i]]
            assert all(torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4)
                       for a, b in zip(other, together[i]))
    assert {len(s.ids) for g in together for s in g} > {1, 2}


def test_log_probs_are_the_trainers_at_any_temperature(tiny):
    for temperature in (1.0, 0.6, 1.7):
        for prompt, samples in zip(PROMPTS, generate(sampler_of(tiny), PROMPTS, temperature=temperature)):
            got = torch.tensor([lp for s in samples for lp in s.log_probs])
            want = policy.log_probs(tiny, prompt, [s.ids for s in samples], temperature=temperature)
            assert torch.allclose(got, want, atol=1e-4)


def test_every_end_token_ends_a_reply_and_is_kept(tiny):
    samples = [s for g in generate(sampler_of(tiny, set(range(0, 49152, 2))), PROMPTS, n=16) for s in g]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert stopped and all(s.ids[-1] % 2 == 0 and all(i % 2 for i in s.ids[:-1]) for s in stopped)
    assert len({s.ids[-1] for s in stopped}) > 5
    assert all(len(s.ids) == 12 for s in samples if s.finish_reason == "length")


def test_end_ids_are_the_union_of_tokenizer_and_generation_config(embedded):
    model, tokenizer = embedded
    assert policy.end_ids(model, tokenizer) == {2}
    saved, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [1, 106]
    assert policy.end_ids(model, tokenizer) == {1, 2, 106}
    model.generation_config.eos_token_id = saved


def test_greedy_is_what_transformers_generates(embedded):
    model, tokenizer = embedded
    texts = ["Write a Python function add_one(n).", "Name three colours, please. " * 3]
    prompts = [tokenizer(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                                       add_generation_prompt=True))["input_ids"] for text in texts]
    ours = sampler_of(model).generate(prompts, 1, max_new_tokens=24, temperature=0.0, seeds=[0, 0])
    for prompt, samples in zip(prompts, ours):
        theirs = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert samples[0].ids == theirs


def test_folded_attention_in_bfloat16_stays_close_to_the_trainer(embedded):
    model, tokenizer = embedded
    prompts = [tokenizer("def add(a, b):\n")["input_ids"], tokenizer("Once upon a time " * 20)["input_ids"]]
    for prompt, samples in zip(prompts, generate(sampler_of(model, dtype=torch.bfloat16), prompts, max_new_tokens=24)):
        with torch.no_grad():
            want = policy.log_probs(model, prompt, [s.ids for s in samples])
        difference = (torch.tensor([lp for s in samples for lp in s.log_probs]) - want).abs()
        assert difference.mean() < 0.08 and difference.max() < 1.0


def test_sync_brings_the_new_weights(tiny):
    sampler = sampler_of(tiny, dtype=torch.bfloat16)
    before = generate(sampler, PROMPTS)
    with torch.no_grad():
        for p in tiny.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    assert generate(sampler, PROMPTS) == before
    sampler.sync(tiny)
    after = generate(sampler, PROMPTS)
    assert after != before
    assert after == generate(sampler_of(tiny, dtype=torch.bfloat16), PROMPTS)


def test_draws_follow_the_distribution_and_the_seed():
    logits = torch.tensor([[0.0, 1.0, -1.0, float("-inf"), 2.0]]).repeat(20000, 1)
    u = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    token, log_p = _draw(logits, 0.7, u)
    want = (logits[0] / 0.7).softmax(-1)
    assert torch.allclose(token.bincount(minlength=5) / 20000, want, atol=0.012)
    assert torch.allclose(log_p, want.log()[token])
    assert _draw(logits[:2], 1.0, torch.tensor([0.0, 1 - 1e-7]))[0].tolist() == [0, 4]


def test_streams_differ():
    assert len({stream(seed, step, i) for seed in range(4) for step in range(50) for i in range(16)}) == 4 * 50 * 16


def test_progress_counts_every_sample_once(tiny):
    done = []
    sampler_of(tiny, set(range(0, 49152, 3))).generate(PROMPTS, 5, max_new_tokens=6, temperature=1.0, seeds=[0, 1, 2],
                                                       progress=done.append)
    assert sum(done) == 15


# ---- which engine, and the self-check ------------------------------------------------------------------------------------


def broken(folder, **packages):
    """A folder for PYTHONPATH whose packages fail to import, each with its own line."""
    for name, line in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"{line}\n")
    return os.environ | {"PYTHONPATH": str(folder), "CI": "1"}


@pytest.mark.parametrize("packages, words", [
    ({"vllm": "", "torchvision": "raise RuntimeError('operator torchvision::nms does not exist')"},
     ["torchvision", "pip uninstall -y torchvision torchaudio torchcodec"]),
    ({"vllm": "raise ImportError('libcudart.so.13: cannot open shared object file')"}, ["libcudart.so.13", "make train-vllm"]),
])
def test_a_broken_vllm_stops_a_run_that_asks_for_it_and_no_other(tmp_path, tiny_folder, packages, words):
    env = broken(tmp_path, **packages)

    def run(engine):
        return subprocess.run(
            [sys.executable, "train.py", f"log.dir={tmp_path}/runs", "log.name=a", f"model.name={tiny_folder}", "train.steps=1",
             "env.name=tests.toy:Toy", "train.prompts_per_step=1", "train.group_size=2", "sampler.max_new_tokens=4",
             f"sampler.engine={engine}"], cwd=Path(train.__file__).parent, env=env, capture_output=True, text=True)

    asked = run("vllm")
    assert asked.returncode == 2 and len(asked.stderr.strip().splitlines()) == 1, asked.stderr
    assert all(word in asked.stderr for word in ["sampler.engine = 'vllm'", "sampler.engine=transformers", *words])
    assert not (tmp_path / "runs").exists()
    free = run("auto")
    assert free.returncode == 0, free.stderr
    (line,) = [text for text in free.stdout.splitlines() if text.startswith("sampling with ")]
    assert "transformers" in line and ("torchvision" in line or "faster than vLLM" in line)


def test_without_vllm_a_run_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(policy, "load", lambda *a: pytest.fail("a model was loaded"))
    assert train.main(["sampler.engine=vllm", f"log.dir={tmp_path}/runs"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "vLLM is not installed (make train-vllm installs it)" in error
    assert choose("auto", "auto") == ("transformers", "vLLM is not installed (make train-vllm installs it)")
    assert choose("transformers", "cpu")[0] == "transformers"


def test_auto_takes_vllm_on_a_gpu_only(monkeypatch):
    """On a CPU it is not even imported; on a GPU an installation for CPUs is named as what it is."""
    vllm = pytest.importorskip("vllm")
    assert choose("auto", "cpu") == ("transformers", "on a CPU it is faster than vLLM from 32 sequences on")
    assert choose("vllm", "cpu")[0] == "vllm"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if "cpu" in vllm.__version__ or vllm.platforms.current_platform.is_cpu():
        engine, why = choose("auto", "auto")
        assert engine == "transformers" and "is for cpu, the model is on cuda (make train-vllm" in why
        with pytest.raises(ValueError, match="is for cpu"):
            choose("vllm", "auto")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sampler_with_other_weights_is_caught_at_its_sync(embedded, dtype, monkeypatch):
    model, tokenizer = embedded
    cfg = config.read(None, None, [f"sampler.dtype={dtype}", f"model.dtype={dtype}"])
    sampler = sampler_of(model, dtype=getattr(torch, dtype))
    metrics = sync(sampler, model, tokenizer, cfg)
    assert 0 <= metrics["sync_diff/mean"] <= metrics["sync_diff/max"] < {"float32": 1e-3, "bfloat16": 1.0}[dtype]
    other = policy.load(policy.EMBEDDED)[0]
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    monkeypatch.setattr(sampler, "sync", lambda model: None)
    with pytest.raises(SamplerError, match=f"max_sync_diff_{dtype}"):
        sync(sampler, other, tokenizer, cfg)
