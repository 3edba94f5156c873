"""How long advantages take: this project's beside TRL's two aggregations and verl's grpo and gdpo, in one run.

    OMP_NUM_THREADS=1 python tests/bench_advantages.py [--device cuda] [--seconds 3]

The peers are what is installed beside this file (TRL 1.16, verl 0.9); nothing of them is copied: TRL's lines are cut out of its
trainer at run time, as they ship but for `is_std_zero`, which only logs. Ten calls each, in turns, so that all see the same
machine; medians. Every contestant starts from a float32 tensor [N, K] of rewards and weights of 1; verl from what its
estimators take, components and uids in object arrays. `through skip_missing` is what the recipes call.
"""

import argparse
import ast
import inspect
import statistics
import sys
import textwrap
import time
import types
import uuid
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from corrgrpo import ESTIMATORS, corrgrpo, skip_missing

SIZES = [(64, 8, 3), (512, 16, 4), (4096, 16, 8)]


def trl_advantages(aggregation):
    """The statements of TRL's trainer from the mask of unscorable completions to the advantages, as a function."""
    import trl.trainer.grpo_trainer as trl

    tree = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)))
    names = [getattr(getattr(s, "targets", [None])[0], "id", None) for s in tree.body[0].body]
    start = names.index("unscorable_mask")
    body = tree.body[0].body[start : names.index("advantages", start) + 1]

    class WithoutLogging(ast.NodeTransformer):
        def visit_Assign(self, node):
            return None if getattr(node.targets[0], "id", None) == "is_std_zero" else node

    module = ast.fix_missing_locations(WithoutLogging().visit(ast.Module(body, [])))
    code, scope = compile(module, trl.__file__, "exec"), dict(vars(trl))

    def run(rewards, size, weights):
        me = types.SimpleNamespace(multi_objective_aggregation=aggregation, scale_rewards="group", reward_weights=weights,
                                   reward_funcs=[None] * rewards.shape[1])
        scope.update({"self": me, "rewards_per_func": rewards, "num_generations": size, "device": rewards.device})
        exec(code, scope)
        return scope["advantages"]
    return run


def verl_advantages(name):
    import numpy as np
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    made = {}

    def run(rewards, size, weights):
        n, k = rewards.shape
        if n not in made:                                            # verl's own form of the input: not its estimator's time
            uids = np.array([str(uuid.uuid4()) for _ in range(n // size)], dtype=object).repeat(size)
            made[n] = {
                "token_level_rewards": (rewards * weights).sum(1, keepdim=True), "index": uids,
                "response_mask": torch.ones(n, 1, device=rewards.device),
                "config": OmegaConf.create({"gdpo_reward_keys": [f"r{i}" for i in range(k)], "gdpo_reward_weights": [1.0] * k}),
                "non_tensor_batch": {f"r{i}": np.array(rewards[:, i].tolist(), dtype=object) for i in range(k)},
                "batch": {"prompts": torch.zeros(n, 1, device=rewards.device),
                          "attention_mask": torch.ones(n, 2, dtype=torch.long, device=rewards.device)}}
        given = made[n]
        if name == "grpo":
            given = {key: given[key] for key in ("token_level_rewards", "index", "response_mask", "config")}
        return core_algos.get_adv_estimator_fn(name)(**given)[0]
    return run


def contestants():
    ours = {"corrgrpo": corrgrpo, "corrgrpo, through skip_missing": lambda *a: skip_missing(corrgrpo, *a),
            "corrgrpo, group ids": lambda r, size, w: corrgrpo(r, torch.arange(len(r), device=r.device) // size, w)}
    ours |= {name: ESTIMATORS[name] for name in ("grpo", "gdpo")}
    peers = {}
    for label, make, arguments in [("TRL", trl_advantages, ("sum_then_normalize", "normalize_then_sum")),
                                   ("verl", verl_advantages, ("grpo", "gdpo"))]:
        for argument in arguments:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    peers[f"{label} {argument}"] = make(argument)
            except ImportError as e:
                print(f"{label} {argument} is left out: {e}")
    return ours, peers


def measure(functions, rewards, size, weights, seconds):
    """Median milliseconds of each. Those that take long are called seldom, three times at least."""
    sync = torch.cuda.synchronize if rewards.is_cuda else (lambda: None)
    times = {name: [] for name in functions}

    def call(name):
        sync()
        start = time.perf_counter()
        functions[name](rewards, size, weights)
        sync()
        times[name].append(1e3 * (time.perf_counter() - start))

    for name in functions:                                           # warm up
        call(name)
        call(name) if times[name][0] < 1e3 else None
    first = {name: min(t) for name, t in times.items()}
    times = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in functions:
            for _ in range(10 if first[name] < 20 else 1 if len(times[name]) < 3 else 0):
                call(name)
    return {name: statistics.median(t) for name, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, peers = contestants()
    rows = {name: [] for name in [*ours, *peers]}
    for groups, size, k in SIZES:
        rewards = torch.rand(groups * size, k, generator=torch.Generator().manual_seed(0)).to(args.device)
        slow = {name for name in peers if name.startswith("verl") and groups > 1000}     # minutes a call
        some = {name: f for name, f in (ours | peers).items() if name not in slow}
        for name, ms in measure(some, rewards, size, torch.ones(k, device=args.device), args.seconds).items():
            rows[name].append(ms)
    print(f"\nmilliseconds, median; torch {torch.__version__}, {args.device}, one thread; groups x rollouts x rewards")
    print(f"{'':34}" + "".join(f"{'x'.join(map(str, s)):>14}" for s in SIZES) + "    time over corrgrpo's")
    for name, ms in rows.items():
        ratios = "".join(f"{m / base:9.2f}" for m, base in zip(ms, rows["corrgrpo"]))
        print(f"{name:34}" + "".join(f"{m:14.3f}" for m in ms) + " " * 14 * (len(SIZES) - len(ms)) + ratios)


if __name__ == "__main__":
    main()
