"""Checks on a GPU machine what no machine without one can: policy and both engines on the card. Under five minutes.

    python tests/gpu_check.py               # the embedded model; ends with status 1 if a check fails

Prints a table: what, the figure, whether it holds. Where vLLM is not installed, or there is no GPU, it checks what it can and
says what it left out. Each engine and dtype has a process of its own.
"""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import config
import policy
from sampler import SamplerError, choose, make, sync

CUDA = torch.cuda.is_available()
rows: list[tuple[str, str, bool | None]] = []


def note(what: str, figure: str, holds: bool | None = True) -> None:
    """holds: None for what was left out."""
    rows.append((what, figure, holds))
    print(f"{'left out' if holds is None else 'ok' if holds else 'FAILS':10}{what:64}{figure}", flush=True)


def used_gb() -> float:
    if not CUDA:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def check_policy(model, prompt: list[int], replies: list[list[int]]) -> None:
    with torch.no_grad():
        shared, single = (policy.log_probs(model, prompt, replies, share_prompt=share) for share in (True, False))
    difference = (shared - single).abs().max().item()
    note("policy: a shared prompt equals one sequence a row, float32", f"{difference:.1e} nats", difference < 1e-3)
    begun = time.perf_counter()
    with torch.autocast(model.device.type, torch.bfloat16):
        policy.log_probs(model, prompt, replies).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    model.zero_grad(set_to_none=True)
    note("policy: forward and backward in bfloat16", f"{time.perf_counter() - begun:.2f} s, gradient norm {norm:.2f}",
         0 < norm < float("inf"))


def check_engine(engine: str, dtype: str, model, tokenizer, source: str) -> None:
    name = f"{engine}, {dtype}"
    cfg = config.read(None, None, [f"sampler.engine={engine}", f"sampler.dtype={dtype}", "model.dtype=float32"])
    before, begun = used_gb(), time.perf_counter()
    sampler, _ = make(cfg, model, tokenizer, source)
    differences = [sync(sampler, model, tokenizer, cfg)["sync_diff/mean"]]
    note(f"{name}: starts", f"{time.perf_counter() - begun:.0f} s, {used_gb() - before:.1f} GB more on the card")
    prompts = [tokenizer(f"Write a poem about the number {i}. " * 30)["input_ids"] for i in range(16)]
    for round_ in range(3):
        with torch.no_grad():
            for p in model.parameters():                        # another model, as after an update
                p.mul_(1 + 1e-3 * (round_ + 1))
        if engine == "vllm" and CUDA:
            awake = used_gb()
            sampler.sleep()
            note(f"{name}: sleep gives memory back", f"{awake - used_gb():.1f} GB", awake - used_gb() > 0.5)
        begun = time.perf_counter()
        differences.append(sync(sampler, model, tokenizer, cfg)["sync_diff/mean"])
        seconds = time.perf_counter() - begun
    limit = 1e-3 if dtype == "float32" else 0.3
    note(f"{name}: log-probabilities after each of three syncs", ", ".join(f"{d:.1e}" for d in differences),
         max(differences) < limit)
    note(f"{name}: a sync with its check", f"{seconds:.2f} s")
    begun = time.perf_counter()
    kinds = [sampler.generate(prompts, 8, max_new_tokens=128 if CUDA else 8, temperature=1.0, seeds=list(range(16)))
             for _ in range(2)]
    seconds = (time.perf_counter() - begun) / 2
    tokens = [[s.ids for group in samples for s in group] for samples in kinds]
    note(f"{name}: 128 sequences", f"{sum(map(len, tokens[0])) / seconds:.0f} tokens/s")
    same = sum(a == b for a, b in zip(*tokens)) / len(tokens[0])
    note(f"{name}: the same seeds give the same samples", f"{100 * same:.0f} %", same == 1 if dtype == "float32" else True)


def main(engine: str = "", dtype: str = "") -> int:
    begun, device = time.perf_counter(), torch.device("cuda" if CUDA else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    source = policy.source(policy.EMBEDDED)
    model, tokenizer = policy.load(source)
    model.to(device)
    if engine:
        try:
            check_engine(engine, dtype, model, tokenizer, source)
        except SamplerError as problem:
            note(f"{engine}, {dtype}", str(problem).splitlines()[0], False)
        return int(any(holds is False for _, _, holds in rows))
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if CUDA else 'a CPU'}")
    prompt = tokenizer("A prompt that eight replies share. " * 8)["input_ids"]
    check_policy(model, prompt, [list(range(100 + i, 120 + 3 * i)) for i in range(8)])
    failed = sum(holds is False for _, _, holds in rows)
    model.cpu()
    for engine in ("transformers", "vllm"):
        try:
            choose(engine, device.type)
        except ValueError as problem:
            note(engine, str(problem), None)
            continue
        for dtype in ("float32", "bfloat16"):
            failed += subprocess.run([sys.executable, __file__, engine, dtype]).returncode != 0
    if not CUDA:
        note("sleep, wake-up, the card's memory, CUDA graphs", "no GPU here", None)
    print(f"{failed} failed, {time.perf_counter() - begun:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
