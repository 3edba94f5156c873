"""The vLLM engine of sampler.py: vLLM 0.32 in this process, on a GPU or on a CPU, with the trainer's weights.

Where it differs between the two, the GPU parts (sleep and wake-up, CUDA graphs, the share of the card's memory) are written
against the release's source and untested on the machine they were written on; `python tests/gpu_check.py` tests them.

What makes a sampler silently stale, and what is done about it here (both were measured on this release):
- With tied embeddings a CPU engine multiplies by a packed copy of the output head, which `reload_weights` leaves as it was.
  `sync` packs it again, and compares columns of the head that the engine really multiplies by, bit for bit, with the model's.
- Keys and values in the prefix cache are the old weights'. `sync` resets the cache, after it has put a prompt into it, and
  before it asks that no token of this prompt comes from the cache any more.
Neither depends on the learning rate or on the dtype's rounding, as a comparison of log-probabilities does.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from sampler import Sample, SamplerError, stream

# Read when vLLM is imported: the engine in this process, errors only, no report of its use over the network.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


class VLLMSampler:
    """generate(prompts, n, ...) -> [len(prompts)][n] samples; sync(model): from here on samples come from these weights;
    sleep(): gives a GPU's memory back until the next sync.

    folder: the model in Hugging Face format, or its name on the hub; its weights only serve until the first sync. cfg: the
    [sampler] section. probe: a prompt, longer than two blocks of the prefix cache. A GPU engine sleeps until the first sync.
    `context` is how many tokens a prompt and its reply may have together: the model's context, or what fits into the cache.
    Raises SamplerError if vLLM cannot start.
    """

    def __init__(self, folder: str, eos_ids: set[int], dtype: torch.dtype, device: torch.device, probe: list[int],
                 cfg: SimpleNamespace):
        self.dtype, self.device, self.cuda = dtype, device, device.type == "cuda"
        self.asleep, self.can_sleep = False, self.cuda and cfg.sleep
        self.eos_ids = sorted(eos_ids)
        if self.cuda:
            memory = {"gpu_memory_utilization": cfg.gpu_memory_utilization, "enable_sleep_mode": self.can_sleep}
            torch.cuda.empty_cache()
        else:   # a prompt that is cut in two has its draw taken back, which a CPU generator cannot do (the release crashes)
            memory = {"kv_cache_memory_bytes": int(cfg.kv_cache_gb * 2**30), "enforce_eager": True,
                      "enable_chunked_prefill": False}
        set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
        try:
            self.llm = LLM(folder, dtype=str(dtype).removeprefix("torch."), max_num_seqs=cfg.batch_size, max_model_len=-1,
                           enable_prefix_caching=True, logprobs_mode="processed_logprobs", generation_config="vllm",
                           skip_tokenizer_init=True, use_tqdm_on_load=False, **memory)
        except Exception as e:      # many kinds, from the model's architecture to the card's memory
            raise SamplerError(f"vLLM cannot start with this model and configuration: {e}\nsampler.engine=transformers does "
                               "without it; sampler.gpu_memory_utilization (sampler.kv_cache_gb on a CPU) is its memory") from e
        torch.set_num_threads = set_num_threads     # a CPU engine forbids it from here on; the trainer's update needs it
        torch.set_num_threads(threads)
        self.engine = self.llm.llm_engine
        self.model = self.llm.apply_model(lambda model: model)[0]
        heads = [m for m in self.model.modules() if isinstance(m, VocabParallelEmbedding)]
        self.heads = [m for m in heads if isinstance(m, ParallelLMHead)] or heads       # some models use the embedding itself
        self.context = self.llm.model_config.max_model_len
        block = self.engine.vllm_config.cache_config.block_size                          # tokens: 128 on a CPU, 16 on a GPU
        self.probe = probe[: min(2 * block + 1, self.context - 1)]
        self.sleep()

    def generate(self, prompts: list[list[int]], n: int, *, max_new_tokens: int, temperature: float,
                 seeds: list[int], progress: Callable[[int], object] = lambda done: None) -> list[list[Sample]]:
        """As TransformersSampler.generate. Sample j of a prompt has the seed (seed, j); what it gets may still depend on the
        batch, by rounding. The n samples of a prompt, and the turns of an episode, find their prompt in the prefix cache."""
        assert len(seeds) == len(prompts)
        outputs = self._run([p for p in prompts for _ in range(n)],
                            [stream(seed, j) for seed in seeds for j in range(n)], max_new_tokens, temperature, progress)
        samples = []
        for output in (out.outputs[0] for out in outputs):
            if output.finish_reason not in ("stop", "length"):
                raise SamplerError(f"vLLM ended a reply with {output.finish_reason!r}, neither by an end token nor by length")
            ids = list(output.token_ids)
            samples.append(Sample(ids, [lp[t].logprob for t, lp in zip(ids, output.logprobs, strict=True)],
                                  output.finish_reason))
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def _run(self, prompts, seeds, max_new_tokens: int, temperature: float = 1.0, progress=lambda done: None) -> list:
        """A RequestOutput for each prompt. No top_p, top_k or min_p, whatever the model's generation_config.json says;
        "processed" log-probabilities are those after the temperature."""
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_new_tokens, logprobs=0, ignore_eos=True,
                                 stop_token_ids=self.eos_ids, detokenize=False) for seed in seeds]
        self.llm.enqueue([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        done = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    done.append(output)
                    progress(1)
        return sorted(done, key=lambda output: int(output.request_id))

    def sleep(self) -> None:
        """On a GPU: gives back the memory of weights and cache, for the update. Level 2 throws the weights away instead of
        copying them to the host: the next sync brings new ones anyway. (A CPU engine cannot sleep.)"""
        if self.can_sleep and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        """All weights, the head's packed copy too, and an empty prefix cache. Raises SamplerError if the engine still has
        something of the old weights."""
        if self.asleep:                 # falling asleep has emptied the cache
            torch.cuda.empty_cache()    # what the update has left in torch's allocator is no use to vLLM's
            self.llm.wake_up(tags=["weights"])
        else:
            self._run([self.probe], [0], 1)
        weights = ((name, p.detach()) for name, p in model.named_parameters())      # a tied head comes once
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True})
        for head in self.heads:
            head.quant_method.process_weights_after_loading(head)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        reset = self.llm.reset_prefix_cache()
        self._check_head(model)
        if not reset or (cached := self._run([self.probe], [0], 1)[0].num_cached_tokens):
            raise SamplerError(f"vLLM's prefix cache was not emptied by the sync of the weights ({cached if reset else 'all'} "
                               "tokens of a prompt came from it): replies would be sampled from keys and values of the old "
                               "weights. sampler.engine=transformers does without vLLM")

    def _check_head(self, model: PreTrainedModel) -> None:
        """A unit vector times the head is a column of it, exactly, in whatever layout the engine keeps it."""
        weight = model.get_output_embeddings().weight                       # [vocabulary, hidden]
        columns = torch.linspace(0, weight.shape[1] - 1, 16).long().tolist()
        unit = torch.zeros(len(columns), weight.shape[1], dtype=self.dtype, device=self.device)
        unit[range(len(columns)), columns] = 1
        for head in self.heads:
            used = head.quant_method.apply(head, unit)[:, : len(weight)]
            if wrong := int((used != weight[:, columns].T.to(used)).sum()):
                raise SamplerError(f"vLLM's output head is not the model's after the sync of the weights ({wrong} of "
                                   f"{used.numel()} numbers differ): replies would be sampled from old weights. "
                                   "sampler.engine=transformers does without vLLM")
