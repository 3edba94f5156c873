"""Token-in, token-out generation: the transformers engine, and the choice between it and vLLM (sampler_vllm.py).

`generate` takes prompts as token ids and returns the sampled ids untouched, with the log-probability of each under the
distribution it was drawn from. Nothing is ever decoded and tokenised again. Masks come from lengths, never from token
values, so that a model whose padding token is its end token still learns to stop.

What makes it quick: a prompt is computed once for its n samples, finished rows leave the batch, keys and values grow in
place, query heads that share a key head go through one attention call, and weights are bfloat16 where the processor
multiplies them natively.
"""

import copy
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import policy


@dataclass
class Sample:
    ids: list[int]              # sampled tokens, the end token included where one was drawn
    log_probs: list[float]      # of each, under the distribution sampled from (greedy: at temperature 1)
    finish_reason: str          # "stop": an end token was drawn; "length": max_new_tokens ran out


def bf16_pays(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are native here. Decided by what the hardware says, not by timing it, so that the
    same machine always gives the same run. On CPUs without such instructions float32 is faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class SamplerError(RuntimeError):
    """The engine cannot start, or does not sample from the model's weights; the message says why and what to do."""


def choose(engine: str, device: str) -> tuple[str, str]:
    """The engine that samples, "vllm" or "transformers", and why; before anything is loaded. device: "cpu", "cuda" or "auto".

    engine "auto" is vLLM on a GPU where it is installed and imports, and transformers on a CPU: there it is the faster of the
    two from 32 sequences on (README, from tests/bench_sampler.py), and vLLM is not even imported. Raises ValueError that says
    what mends it if engine is "vllm" and vLLM does not run here.
    """
    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if engine == "transformers":
        return engine, "as sampler.engine says"
    problem = ""
    if importlib.util.find_spec("vllm") is None:
        problem = "vLLM is not installed (make train-vllm installs it)"
    elif sys.modules.get("torchvision", 0) is None:
        problem = ("vLLM is broken, since the torchvision beside it does not import with this torch "
                   "(pip uninstall -y torchvision torchaudio torchcodec mends it: vLLM needs none of them)")
    elif engine == "auto" and device == "cpu":
        problem = "on a CPU it is faster than vLLM from 32 sequences on"
    else:
        try:
            from vllm.platforms import current_platform

            import sampler_vllm  # noqa: F401
            if current_platform.device_type != device:
                problem = (f"the vLLM that is installed is for {current_platform.device_type or 'another kind of device'}, the "
                           f"model is on {device} (make train-vllm installs the one for this machine)")
        except Exception as e:      # a broken installation raises whatever it likes
            why = (str(e).strip().splitlines() or [""])[0]
            problem = f"vLLM is broken, it does not import: {type(e).__name__}: {why} (make train-vllm installs it anew)"
    if problem and engine == "vllm":
        raise ValueError(f"sampler.engine = 'vllm': {problem}; sampler.engine=transformers does without it")
    return ("transformers", problem) if problem else ("vllm", f"as sampler.engine = {engine!r} says")


def make(cfg: SimpleNamespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str):
    """(the sampler, a sentence that says which it is and why). folder: where the model was loaded from. cfg.sampler.engine
    becomes "vllm" or "transformers". Raises ValueError as `choose`, SamplerError if vLLM is asked for and cannot start."""
    engine, why = choose(cfg.sampler.engine, model.device.type)
    end_ids, dtype = policy.end_ids(model, tokenizer), getattr(torch, cfg.sampler.dtype)
    if engine == "vllm":
        from sampler_vllm import VLLMSampler

        try:
            sampler = VLLMSampler(folder, end_ids, dtype, model.device, probe(tokenizer), cfg.sampler)
        except SamplerError as e:
            if cfg.sampler.engine == "vllm":
                raise
            engine, why = "transformers", str(e).splitlines()[0]
    if engine == "transformers":
        sampler = TransformersSampler(model, end_ids, dtype, cfg.sampler.batch_size)
    cfg.sampler.engine = engine
    return sampler, f"{engine}: {why}; prompt and reply have {sampler.context} tokens at most"


def probe(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt of the self-checks: natural text of some 400 tokens, more than two blocks of vLLM's prefix cache."""
    return tokenizer(f"{__doc__}{policy.__doc__}{policy.log_probs.__doc__}", add_special_tokens=False)["input_ids"]


def sync(sampler, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: SimpleNamespace) -> dict[str, float]:
    """Brings the model's weights to the sampler, then compares log-probabilities on a few sampled tokens.

    Returns sync_diff/mean and sync_diff/max, |sampler - trainer| in nats. Raises SamplerError if the mean is beyond what
    rounding does (sampler.max_sync_diff_*: by the coarser of the two dtypes). That finds wrong weights; weights that are
    merely old differ by less after a small update, which is why VLLMSampler.sync has exact checks of its own.
    """
    sampler.sync(model)
    prompt, temperature = probe(tokenizer)[: min(64, sampler.context - 4)], cfg.sampler.temperature
    samples = sampler.generate([prompt], 4, max_new_tokens=4, temperature=temperature, seeds=[cfg.train.seed])[0]
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=cfg.model.dtype == "bfloat16"):
        ours = policy.log_probs(model, prompt, [s.ids for s in samples], temperature=temperature,
                                share_prompt=cfg.model.share_prompt)
    difference = (ours.cpu() - torch.tensor([lp for s in samples for lp in s.log_probs])).abs()
    dtype = "bfloat16" if "bfloat16" in (cfg.model.dtype, cfg.sampler.dtype) else "float32"
    limit = getattr(cfg.sampler, f"max_sync_diff_{dtype}")
    if not difference.mean() <= limit:
        raise SamplerError(f"after the sync of the weights the sampler's log-probabilities differ from the trainer's by "
                           f"{difference.mean():.4f} nats on average, more than rounding in {dtype} explains "
                           f"(sampler.max_sync_diff_{dtype} = {limit}): it does not sample from the model that is trained. "
                           "Try sampler.engine=transformers, model.share_prompt=false")
    return {"sync_diff/mean": difference.mean().item(), "sync_diff/max": difference.max().item()}


class TransformersSampler:
    """generate(prompts, n, ...) -> [len(prompts)][n] samples; sync(model): from here on samples come from these weights.
    sleep() does nothing: what a GPU holds is the model. `context`: how many tokens prompt and reply may have together.

    dtype: float32 samples from the training model itself; another dtype keeps a copy that `sync` refreshes.
    """

    def __init__(self, model: PreTrainedModel, eos_ids: set[int], dtype: torch.dtype, batch_size: int):
        self.model, self.eos_ids, self.batch_size = model, eos_ids, batch_size
        if dtype != torch.float32:
            self.model = policy.cast(copy.deepcopy(model), dtype)
        if policy.full_attention(model):
            self.model.set_attn_implementation("folded")
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def sleep(self) -> None:
        pass

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        if self.model is not model:
            for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs)

    def generate(self, prompts: list[list[int]], n: int, *, max_new_tokens: int, temperature: float,
                 seeds: list[int], progress: Callable[[int], object] = lambda done: None) -> list[list[Sample]]:
        """seeds: one a prompt. Sample j of a prompt draws from a stream of its own, (seed, j), so what a prompt gets does
        not depend on who shares its batch. temperature 0 is greedy. progress: told how many samples were finished."""
        assert len(seeds) == len(prompts)
        samples: list[list[Sample]] = [[] for _ in prompts]
        per_batch = max(1, self.batch_size // n)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours of like length: little padding
        for start in range(0, len(order), per_batch):
            part = order[start : start + per_batch]
            uniform = torch.stack([
                torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(stream(seeds[i], j)))
                for i in part for j in range(n)])
            rows = self._batch([prompts[i] for i in part], n, temperature, uniform, progress)
            for k, i in enumerate(part):
                samples[i] = rows[k * n : (k + 1) * n]
        return samples

    @torch.inference_mode()
    def _batch(self, prompts: list[list[int]], n: int, temperature: float, uniform: Tensor, progress) -> list[Sample]:
        """uniform: [rows, max_new_tokens] in [0, 1), the only randomness."""
        device, width = self.model.device, max(map(len, prompts))
        # Left padding, so that every row's next token stands in the same column; position ids skip the padding.
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        out = self.model(
            input_ids=ids, attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0), use_cache=True,
            past_key_values=Cache(layer_class_to_replicate=_GrowingLayer) if policy.full_attention(self.model) else None,
            logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(n)
        logits, seen = out.logits[:, -1].repeat_interleave(n, 0), seen.repeat_interleave(n, 0)
        position, uniform = seen.sum(-1, keepdim=True), uniform.to(device)
        samples = [Sample([], [], "length") for _ in uniform]
        rows = samples                                  # rows[r]: the sample that row r of the batch belongs to
        for step in range(uniform.shape[1]):
            token, log_prob = _draw(logits, temperature, uniform[:, step])
            for sample, t, lp in zip(rows, token.tolist(), log_prob.tolist(), strict=True):
                if sample.finish_reason != "stop":
                    sample.ids.append(t)
                    sample.log_probs.append(lp)
                    if t in self.eos_ids:
                        sample.finish_reason = "stop"
                        progress(1)
            keep = [r for r, sample in enumerate(rows) if sample.finish_reason != "stop"]
            if not keep or step + 1 == uniform.shape[1]:
                break
            if len(keep) <= 0.75 * len(rows):           # compacting copies the cache, so not at every end token
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                token, seen, position, uniform = token[index], seen[index], position[index], uniform[index]
                rows = [rows[r] for r in keep]
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
            logits = self.model(input_ids=token[:, None], attention_mask=seen, position_ids=position, use_cache=True,
                                past_key_values=cache).logits[:, -1]
            position = position + 1
        progress(len(keep))
        return samples


def _draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, by inverting the cumulative distribution at `uniform`, and its log-probability; both [rows]."""
    log_p = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = log_p.argmax(-1)
    else:
        cumulative = log_p.exp().cumsum(-1)
        token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(-1)
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def stream(*parts: int) -> int:
    """A seed made of several integers (run seed, step, prompt, ...), so that no two streams of a run coincide."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class _GrowingLayer(DynamicLayer):
    """Keys and values written in place into buffers with room to spare; DynamicLayer copies all of them every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers, self.length = [key_states[:, :, :0], value_states[:, :, :0]], 0
        start, self.length = self.length, self.length + key_states.shape[2]
        for i, new in enumerate((key_states, value_states)):
            if self.length > self.buffers[i].shape[2]:
                grown = new.new_empty(*new.shape[:2], self.length + 64, new.shape[3])
                grown[:, :, :start] = self.buffers[i][:, :, :start]
                self.buffers[i] = grown
            self.buffers[i][:, :, start : self.length] = new
        return self._set(self.buffers)

    def _set(self, buffers: list[Tensor]) -> tuple[Tensor, Tensor]:
        self.buffers = buffers
        self.keys, self.values = (b[:, :, : self.length] for b in buffers)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._set([b.repeat_interleave(repeats, 0) for b in self.buffers])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._set([b[indices] for b in self.buffers])


def _folded_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """For one new token a row, the query heads that share a key head become the "tokens" of one head: no repeated keys.
    Everything else goes to transformers' own attention."""
    rows, heads, tokens, size = query.shape
    if tokens > 1 or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = F.scaled_dot_product_attention(query.view(rows, key.shape[1], -1, size), key, value,
                                         attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, 1, -1).transpose(1, 2), None


AttentionInterface.register("folded", _folded_attention)
AttentionMaskInterface.register("folded", sdpa_mask)
