"""vLLM as the sampler: the real engine on the embedded model, on a CPU. Whole runs are of a tiny model."""

import copy
import ctypes
import gc
import json
from types import SimpleNamespace

import pytest
import torch

import config
import policy
import sampler
import train

try:
    sampler.choose("vllm", "cpu")
except ValueError as e:
    pytest.skip(f"no vLLM here: {e}", allow_module_level=True)

from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from sampler_vllm import VLLMSampler


def start(embedded, dtype, *overrides):
    """A model of its own, an engine for it, and what the tests need beside them."""
    cfg = config.read(None, None, ["sampler.engine=vllm", f"sampler.dtype={dtype}", f"model.dtype={dtype}",
                                   "sampler.kv_cache_gb=0.1", "sampler.batch_size=16", *overrides])
    model, tokenizer = copy.deepcopy(embedded[0]), embedded[1]
    made, why = sampler.make(cfg, model, tokenizer, policy.source(policy.EMBEDDED))
    assert isinstance(made, VLLMSampler) and why.startswith("vllm: ")
    text = sampler.probe(tokenizer)
    prompts = [text[50 : 50 + 2 * 128 + 40], text[: 2 * 128 + 30]]
    return SimpleNamespace(cfg=cfg, model=model, tokenizer=tokenizer, vllm=made, prompts=prompts,
                           sync=lambda: sampler.sync(made, model, tokenizer, cfg))


@pytest.fixture(scope="module")
def float32(embedded):
    yield start(embedded, "float32")
    gc.collect()
    cleanup_dist_env_and_memory()


def update(setup, learning_rate, times=1):
    """Policy-gradient steps on samples of the engine's own, of AdamW without momentum: every weight moves by the rate."""
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=learning_rate, betas=(0.0, 0.0), weight_decay=0.0)
    for i in range(times):
        samples = setup.vllm.generate(setup.prompts[:1], 2, max_new_tokens=8, temperature=1.0, seeds=[i])[0]
        log_p = policy.log_probs(setup.model, setup.prompts[0], [s.ids for s in samples])
        (log_p[:8].mean() - log_p[8:].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(setup, temperature=1.0, model=None):
    """Over every token sampled after prompts longer than two cache blocks: sampler against the bare transformers forward."""
    out, model = [], model or setup.model
    groups = setup.vllm.generate(setup.prompts, 2, max_new_tokens=12, temperature=temperature, seeds=[1, 2])
    for prompt, samples in zip(setup.prompts, groups, strict=True):
        for s in samples:
            assert len(s.ids) == len(s.log_probs) >= 1
            with torch.no_grad():
                logits = model(torch.tensor([prompt + s.ids])).logits[0, len(prompt) - 1 : -1].float() / temperature
            out.append((torch.tensor(s.log_probs) - logits.log_softmax(-1)[range(len(s.ids)), s.ids]).abs().max().item())
    return max(out)


def test_what_is_sampled_has_the_models_log_probs_before_and_after_training(float32):
    float32.sync()
    assert largest_difference(float32) < 1e-3
    assert largest_difference(float32, temperature=0.6) < 1e-3
    for times in (1, 9):
        update(float32, 1e-5, times)
        assert largest_difference(float32) > 1e-2               # else what follows would prove nothing
        metrics = float32.sync()
        assert largest_difference(float32) < 1e-3
        assert 0 < metrics["sync_diff/mean"] <= metrics["sync_diff/max"] < 1e-3


def provoke_a_stale_head_and_a_stale_cache(setup, monkeypatch):
    """One tiny update (the paper's learning rate), then each failure alone; then a sync without any."""
    setup.sync()
    update(setup, 1e-6)
    with monkeypatch.context() as patch:        # vLLM as it is: reload_weights leaves the packed head alone
        patch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
        with pytest.raises(sampler.SamplerError, match="output head is not the model's"):
            setup.sync()
    setup.sync()
    update(setup, 1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(setup.vllm.llm, "reset_prefix_cache", lambda: True)
        with pytest.raises(sampler.SamplerError, match="prefix cache was not emptied"):
            setup.sync()
        patch.setattr(setup.vllm.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(sampler.SamplerError, match="prefix cache was not emptied"):
            setup.sync()
    return setup.sync()


def test_a_stale_head_and_a_stale_cache_are_caught_in_float32(float32, monkeypatch):
    provoke_a_stale_head_and_a_stale_cache(float32, monkeypatch)


def test_other_weights_than_the_models_are_caught(float32, monkeypatch):
    float32.sync()
    monkeypatch.setattr(float32.vllm, "sync", lambda model: None)
    with torch.no_grad():
        float32.model.model.layers[3].mlp.down_proj.weight.mul_(1.02)
    with pytest.raises(sampler.SamplerError, match="max_sync_diff_float32"):
        float32.sync()


def test_thirty_syncs_leave_memory_flat(float32):
    def resident():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)                        # what is freed but not given back is no leak
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096 / 2**20

    for _ in range(4):
        float32.vllm.sync(float32.model)
    before = resident()
    for _ in range(30):
        float32.vllm.sync(float32.model)
    assert resident() - before < 300                            # MiB; one layer's weights, left at each sync, are 420


def test_the_same_seed_gives_the_same_samples_and_each_rollout_its_own(float32):
    float32.sync()
    a, b, c = (float32.vllm.generate(float32.prompts, 4, max_new_tokens=12, temperature=1.0, seeds=seeds)
               for seeds in ([7, 8], [7, 8], [7, 9]))
    assert [[s.ids for s in group] for group in a] == [[s.ids for s in group] for group in b]
    assert [s.ids for s in a[0]] == [s.ids for s in c[0]] and [s.ids for s in a[1]] != [s.ids for s in c[1]]
    assert all(len({tuple(s.ids) for s in group}) == 4 for group in a)


def test_greedy_is_what_the_transformers_engine_says(float32):
    float32.sync()
    other = sampler.TransformersSampler(float32.model, {2}, torch.float32, 64)
    ours, theirs = (s.generate(float32.prompts, 1, max_new_tokens=24, temperature=0.0, seeds=[0, 0])
                    for s in (float32.vllm, other))
    for (a,), (b,) in zip(ours, theirs, strict=True):
        assert a.ids == b.ids and a.finish_reason == b.finish_reason
        assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-3)


def test_every_end_token_ends_a_reply_and_is_kept(float32, monkeypatch):
    monkeypatch.setattr(float32.vllm, "eos_ids", list(range(0, 49152, 2)))
    done = []
    samples = [s for g in float32.vllm.generate(float32.prompts, 16, max_new_tokens=3, temperature=2.0, seeds=[0, 1],
                                                progress=done.append) for s in g]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert all(s.ids[-1] % 2 == 0 and all(i % 2 for i in s.ids[:-1]) for s in stopped)
    assert len({s.ids[-1] for s in stopped}) > 5 and {len(s.ids) for s in stopped} >= {1, 2}
    assert any(s.finish_reason == "length" for s in samples)
    assert all(len(s.ids) == 3 and s.ids[-1] % 2 for s in samples if s.finish_reason == "length")
    assert all(len(s.ids) == len(s.log_probs) for s in samples) and sum(done) == 32


def test_a_batch_larger_than_the_cache_and_than_the_decoded_batch(float32):
    """24 prompts of three blocks each; the cache has 17 blocks."""
    assert float32.vllm.engine.vllm_config.cache_config.num_gpu_blocks < 20
    float32.sync()
    prompts = [[100 + i, *float32.prompts[0]] for i in range(24)]
    got = float32.vllm.generate(prompts, 1, max_new_tokens=4, temperature=1.0, seeds=list(range(24)))
    for i in (0, 12, 23):
        with torch.no_grad():
            want = policy.log_probs(float32.model, prompts[i], [got[i][0].ids])
        assert torch.allclose(torch.tensor(got[i][0].log_probs), want, atol=1e-3)


def test_the_turns_of_an_episode_find_the_last_ones_in_the_cache(float32):
    float32.sync()
    first = float32.vllm._run(float32.prompts[:1], [0], 8)[0]
    longer = float32.prompts[0] + list(first.outputs[0].token_ids) + [5, 6, 7]
    assert first.num_cached_tokens == 0 and float32.vllm._run([longer], [0], 8)[0].num_cached_tokens == 256


def test_the_trainers_threads_stay_its_own(float32):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_bfloat16_stays_close_and_stale_parts_are_caught_there_too(embedded, monkeypatch):
    setup = start(embedded, "bfloat16", "sampler.batch_size=64", "sampler.kv_cache_gb=0.2")
    metrics = provoke_a_stale_head_and_a_stale_cache(setup, monkeypatch)
    assert metrics["sync_diff/mean"] < setup.cfg.sampler.max_sync_diff_bfloat16 / 2
    # Of updates as small as these bfloat16 keeps a part only, so the comparison is with the rounded weights.
    rounded = policy.cast(copy.deepcopy(setup.model), torch.bfloat16)
    assert largest_difference(setup, model=rounded) < 0.5
    # A step's worth of prompts: 6,600 tokens. The release's default cuts one of them in two, and cannot on a CPU.
    prompts = [[100 + i, *setup.prompts[0][:109]] for i in range(60)]
    together = setup.vllm.generate(prompts, 1, max_new_tokens=4, temperature=1.0, seeds=list(range(60)))
    for i in (0, 37, 59):
        want = policy.log_probs(rounded, prompts[i], [together[i][0].ids])
        assert torch.allclose(torch.tensor(together[i][0].log_probs), want, atol=0.5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, embedded):
    """A random Llama as small as the engine's attention allows, with the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, pad_token_id=2,
        initializer_range=0.2))
    policy.save(model, embedded[1], tmp_path_factory.mktemp("tiny") / "model")
    return tmp_path_factory.getbasetemp() / "tiny0" / "model"


def run(folder, model, *more):
    return train.main([f"log.dir={folder}", f"model.name={model}", "env.name=tests.toy:Toy", "sampler.engine=vllm",
                       "sampler.kv_cache_gb=0.05", "sampler.dtype=float32", "model.dtype=float32", "train.prompts_per_step=2",
                       "train.group_size=4", "sampler.max_new_tokens=12", "train.learning_rate=1e-3", "train.threads=1", *more])


def test_a_run_stopped_and_resumed_yields_the_numbers_of_a_whole_one(tiny, tmp_path, capsys):
    """Two turns, so that replies come out of the prefix cache too."""
    assert run(tmp_path, tiny, "env.turns=2", "log.name=whole", "train.steps=3") == 0
    assert "sampling with vllm: " in capsys.readouterr().out
    assert run(tmp_path, tiny, "env.turns=2", "log.name=cut", "train.steps=2") == 0
    assert train.main(["--resume", f"log.dir={tmp_path}", "log.name=cut", "train.steps=3"]) == 0
    whole, cut = ([{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/", "tokens_per_second"))}
                   for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "cut"))
    assert whole == cut and len(whole) == 3
    assert all(0 < row["sync_diff/max"] < 1e-3 for row in whole)
    torch.set_num_threads(2)


def test_a_run_with_a_stale_sampler_stops_with_an_explanation(tiny, tmp_path, capsys, monkeypatch):
    """The release left to itself: nobody packs the tied head again after its weights were loaded anew."""
    start = VLLMSampler.__init__

    def start_and_forget(self, *args):
        start(self, *args)
        monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(VLLMSampler, "__init__", start_and_forget)
    assert run(tmp_path, tiny, "log.name=stale", "train.steps=3") == 1
    assert "error: vLLM's output head is not the model's after the sync of the weights" in capsys.readouterr().err
    assert (tmp_path / "stale" / "metrics.jsonl").read_text() == ""
    torch.set_num_threads(2)
