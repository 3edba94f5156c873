"""Tokens per second of the two engines on the embedded model, in one run, with the memory of each beside it.

    python tests/bench_sampler.py [new tokens]      # default 64; needs vLLM (make train-vllm), else transformers alone

8, 32 and 128 sequences, eight to a prompt of some 100 tokens, in bfloat16 and float32, temperature 1. Each engine and dtype
has a process of its own, so that its memory is its own; the better of two rounds counts, the first of all warms up.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = (8, 32, 128)


def measure(engine: str, dtype: str, new_tokens: int) -> dict:
    import torch

    import config
    import policy
    from sampler import make, sync

    torch.set_num_threads(os.cpu_count() or 1)
    cfg = config.read(None, None, [f"sampler.engine={engine}", f"sampler.dtype={dtype}", "model.dtype=float32",
                                   f"sampler.batch_size={max(SIZES)}"])
    source = policy.source(policy.EMBEDDED)
    model, tokenizer = policy.load(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampler, _ = make(cfg, model.to(device), tokenizer, source)
    sync(sampler, model, tokenizer, cfg)
    text = "Write a Python function that returns the sum of the even numbers of a list, but for those over {}. " * 5
    found = {}
    for size in (SIZES[0], *SIZES):
        prompts = [tokenizer(f"{size}.{i} " + text.format(*[i] * 5))["input_ids"] for i in range(size // 8)]
        best = 0.0
        for r in range(2):
            begun = time.perf_counter()
            samples = sampler.generate(prompts, 8, max_new_tokens=new_tokens, temperature=1.0, seeds=[r] * len(prompts))
            best = max(best, sum(len(s.ids) for group in samples for s in group) / (time.perf_counter() - begun))
        found[size] = best
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"tokens": found, "memory": memory / 1e9}


def main(new_tokens: int) -> None:
    print(f"{'engine':14}{'dtype':10}" + "".join(f"{size:>8} seq." for size in SIZES) + "   peak GB   (tokens a second)")
    for dtype in ("bfloat16", "float32"):
        for engine in ("transformers", "vllm"):
            done = subprocess.run([sys.executable, __file__, engine, dtype, str(new_tokens)], capture_output=True, text=True)
            line = done.stdout.strip().rsplit("\n", 1)[-1]
            if done.returncode:
                print(f"{engine:14}{dtype:10}  left out: {(done.stderr.strip() or line).splitlines()[-1]}")
                continue
            found = json.loads(line)
            print(f"{engine:14}{dtype:10}" + "".join(f"{rate:13.0f}" for rate in found["tokens"].values())
                  + f"{found['memory']:10.1f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
