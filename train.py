"""CorrGRPO: train a language model with several rewards.

    python train.py                                        the embedded model on the starter problems, no GPU needed
    python train.py --config my.toml                       your keys over the defaults in config.toml
    python train.py --preset smoke train.seed=1            a preset, and any key as section.key=value
    python train.py --resume log.name=X                    go on where runs/X was stopped, with its own configuration

Read it from `train` down: sample, score, advantage, update, sync, log, save. Where it differs from GRPO and the paper:
- The advantage is one of corrgrpo.py's estimators; only rewards enter it, the KL penalty is part of the loss.
- With one update per step the old policy is the current one: its log-probabilities are the detached new ones, the ratio is
  1 and clipping cannot bite. They are computed beforehand only where several updates follow one sampling.
- A truncated importance weight corrects for the sampler's rounding (Yao et al. 2025), which the paper does not need.
- Groups in which no reward varies are left out of the update, numerator and denominator (algo.train_dead_groups).
- Where rewards cancel, CorrGRPO divides by almost nothing: algo.max_multiplier and algo.advantage_clip scale such a group
  down, as a whole, so that its mean stays 0.
- Weights and AdamW states are float32; dropout is off.
"""

import argparse
import collections
import itertools
import json
import math
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")     # before torch: threads that spin starve each other on shared cores

import torch
from torch import Tensor
from tqdm import tqdm

import config
import corrgrpo
import policy
import prepare
from logs import RunFolder, comparison, line, plot_dynamics, read_jsonl, replace
from rewards.code import cores
from rollout import Rollout, closing, collect, encode, opens_thinking, score
from sampler import SamplerError, bf16_pays, make, stream, sync


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\nRead it")[0], formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key with its default, as in config.toml:\n\n" + config.DEFAULTS.read_text())
    parser.add_argument("--config", metavar="FILE", help="a TOML file; it needs only the keys that differ from the defaults")
    parser.add_argument("--preset", metavar="NAME", help="a [preset.NAME] table of config.toml or of your file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of runs/NAME (needs log.name)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file, e.g. train.steps=20")
    args = parser.parse_intermixed_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)     # a step's line is in the log file when the step is done
    run = None
    try:
        try:
            run = prepare.prepare(prepare.settings(args), args.resume)
        except (ValueError, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
        train(run)
    except (RunError, SamplerError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = f"; to go on: python train.py --resume log.dir={run.folder.parent} log.name={run.folder.name}" if run else ""
        print(f"\nstopped{hint}", file=sys.stderr)
        return 130
    return 0


def train(run: SimpleNamespace) -> None:
    cfg, env = run.cfg, run.env
    # ---- set up ------------------------------------------------------------------------------------------------------
    torch.set_num_threads(cfg.train.threads or cores())
    torch.manual_seed(cfg.train.seed)       # nothing should need it: every draw has a stream of its own
    device = torch.device("cuda" if cfg.model.device != "cpu" and torch.cuda.is_available() else "cpu")
    warm = run.folder / "warm_start"        # the model after the supervised steps so far: what RL starts from
    source = policy.source(str(run.checkpoint or (warm if warm.exists() else cfg.model.name)))
    model, tokenizer = policy.load(source, cfg.model.chat_template_kwargs)
    cfg.model.chat_template_kwargs = tokenizer.init_kwargs.get("chat_template_kwargs", {})     # its own, if none were given
    model.to(device)
    if cfg.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    native = "bfloat16" if bf16_pays(device) else "float32"
    cfg.model.dtype, cfg.sampler.dtype = (native if x == "auto" else x for x in (cfg.model.dtype, cfg.sampler.dtype))
    cfg.model.share_prompt = cfg.model.share_prompt and policy.full_attention(model)
    sampler, engine = make(cfg, model, tokenizer, source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.learning_rate, fused=True,
                                  betas=(cfg.train.beta1, cfg.train.beta2), weight_decay=cfg.train.weight_decay)
    limit = min(cfg.sampler.max_prompt_tokens, sampler.context - cfg.sampler.max_new_tokens)
    tasks = fitting(run.tasks, tokenizer, limit, "training")
    eval_tasks = fitting(run.eval_tasks[: cfg.eval.limit or None], tokenizer, limit, "evaluation") if run.eval_tasks else []
    state = {"step": 0, "cursor": 0, "skipped": 0, "skipped_in_a_row": 0}
    if run.checkpoint:
        saved = torch.load(run.checkpoint / "trainer.pt", map_location=device)
        optimizer.load_state_dict(saved.pop("optimizer"))
        optimizer.param_groups[0].update(betas=(cfg.train.beta1, cfg.train.beta2), weight_decay=cfg.train.weight_decay)
        state = saved
    logs = RunFolder(run.folder, config.tables(cfg), state["step"])
    print(f"{cfg.model.name}: {model.num_parameters() / 1e6:.0f}M parameters on {device}, forward in {cfg.model.dtype}, "
          f"sampling in {cfg.sampler.dtype}; {len(tasks)} tasks to train on, {len(eval_tasks)} held out; "
          f"{cfg.train.prompts_per_step} x {cfg.train.group_size} rollouts a step, advantage {cfg.algo.advantage}; "
          f"{'resuming after step ' + str(state['step']) + ' in' if run.checkpoint else 'writing to'} {run.folder}", flush=True)
    if notes := getattr(env, "notes", None):
        print(", ".join(f"{name}: {note}" for name, note in notes.items()), flush=True)
        replace(run.folder / "environment.json", json.dumps(notes, indent=1, default=str))
    if cfg.train.warm_start_steps and not run.checkpoint:
        warm_start(run, model, tokenizer, optimizer, [pair for pair in tasks if env.reference(pair[0])], logs)
    difference = sync(sampler, model, tokenizer, cfg)["sync_diff/mean"]
    print(f"sampling with {engine}; its log-probabilities are {difference:.1e} nats from the trainer's", flush=True)
    reference = None
    if cfg.algo.kl > 0:
        start = str(warm) if warm.exists() else cfg.model.name
        reference = policy.cast(policy.load(start)[0], getattr(torch, cfg.model.dtype)).to(device)
    step, evaluated = state["step"], [row["step"] for row in read_jsonl(run.folder / "eval.jsonl")]
    if eval_tasks and (not evaluated or (step not in evaluated and due(step, cfg.eval.every, cfg.train.steps))):
        evaluate(run, sampler, tokenizer, eval_tasks, logs, step)       # the start, or where a kill came between

    # ---- the loop ----------------------------------------------------------------------------------------------------
    bar = tqdm(total=cfg.train.steps, initial=state["step"], desc="steps", unit="step", disable=None, dynamic_ncols=True)
    for step in range(state["step"] + 1, cfg.train.steps + 1):
        lap = stopwatch()

        # sample
        chosen = [tasks[i] for i in draw(len(tasks), state["cursor"], cfg.train.prompts_per_step, cfg.train.seed)]
        with tqdm(total=len(chosen) * cfg.train.group_size, desc="samples", leave=False, disable=None) as samples:
            rollouts = collect(env, sampler, tokenizer, chosen, cfg.train.group_size,
                               seeds=[stream(cfg.train.seed, step, i) for i in range(len(chosen))],
                               max_new_tokens=cfg.sampler.max_new_tokens, temperature=cfg.sampler.temperature,
                               max_tokens=sampler.context, max_response_tokens=cfg.sampler.max_response_tokens,
                               progress=samples.update)
        sampler.sleep()
        seconds = {"time/sample": lap()}

        # score
        score(env, rollouts)
        seconds["time/score"] = lap()

        # advantage
        metrics = advantages(rollouts, run.weights, cfg)

        # update
        optimizer.param_groups[0]["lr"] = lr = (cfg.train.learning_rate * min(1.0, step / max(cfg.train.warmup_steps, 1))
                                                * (1 - cfg.train.learning_rate_decay * (step - 1) / cfg.train.steps))
        metrics |= update(model, reference, optimizer, rollouts, state, cfg)
        seconds["time/update"] = lap()

        # sync
        metrics |= sync(sampler, model, tokenizer, cfg)
        seconds["time/sync"] = lap()

        # log
        state |= {"step": step, "cursor": state["cursor"] + len(chosen)}
        tokens = sum(sum(r.trained) for r in rollouts)
        metrics |= {"lr": lr, "memory/peak_gb": peak_gb(device), "tokens_per_second": tokens / seconds["time/sample"]} | seconds
        logs.metrics({"step": step} | metrics)
        if cfg.log.rollouts:
            logs.rollouts(step, rollouts)
        tqdm.write(line(step, cfg.train.steps, metrics))
        bar.update()

        # save, evaluate: in this order, since an evaluation can be had again on resume
        if due(step, cfg.train.save_every, cfg.train.steps):
            plot_dynamics(run.folder, env.reward_names, cfg.log.smoothing)      # a kill before the checkpoint draws it again
            save_checkpoint(run.folder, model, tokenizer, optimizer, state, cfg.train.keep_checkpoints)
        if eval_tasks and due(step, cfg.eval.every, cfg.train.steps):
            evaluate(run, sampler, tokenizer, eval_tasks, logs, step)
    bar.close()
    policy.save(model, tokenizer, run.folder / "model")
    print(f"the trained model: {run.folder / 'model'}\nthe curves: {run.folder / 'plots' / 'dynamics.png'}, "
          f"{run.folder / 'metrics.jsonl'}, tensorboard --logdir {run.folder}")
    if eval_tasks:
        print(comparison(read_jsonl(run.folder / "eval.jsonl"), env.reward_names))


def due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def warm_start(run: SimpleNamespace, model, tokenizer, optimizer, tasks: list[tuple], logs: RunFolder) -> None:
    """`train.warm_start_steps` steps of plain cross-entropy on the environment's reference replies: the mean over the tokens
    of a step's rows. A row in warm_start.jsonl each; the optimizer's state is forgotten at the end."""
    cfg, folder = run.cfg, run.folder / "warm_start"
    saved = torch.load(folder / "trainer.pt", map_location=model.device) if folder.exists() else {"step": 0}
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])
    logs.cut("warm_start.jsonl", saved["step"])
    size, steps = cfg.train.warm_start_rows, cfg.train.warm_start_steps
    end = closing(tokenizer, policy.end_ids(model, tokenizer))
    model.train(cfg.model.gradient_checkpointing)
    for step in tqdm(range(saved["step"] + 1, steps + 1), desc="warm start", unit="step", disable=None):
        begun = time.perf_counter()
        batch = []
        for i in draw(len(tasks), (step - 1) * size, size, stream(cfg.train.seed, -1)):
            task, prompt = tasks[i]
            text = run.env.reference(task)
            text = text.removeprefix("<think>").lstrip() if opens_thinking(tokenizer, prompt) else text
            batch.append((prompt, [*tokenizer(text, add_special_tokens=False)["input_ids"], end]))
        tokens, loss = sum(len(ids) for _, ids in batch), 0.0
        for prompt, ids in batch:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=cfg.model.dtype == "bfloat16"):
                row_loss = -policy.log_probs(model, prompt, [ids], share_prompt=cfg.model.share_prompt).sum() / tokens
            row_loss.backward()
            loss += row_loss.item()
        lr = cfg.train.warm_start_learning_rate * min(1.0, step / max(cfg.train.warmup_steps, 1))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.max_grad_norm or float("inf")).item()
        if not math.isfinite(norm):
            raise RunError(f"warm start, step {step}: the gradient norm is {norm}. Lower train.warm_start_learning_rate")
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        row = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": tokens, "time": time.perf_counter() - begun}
        logs.metrics(row, "warm_start.jsonl")
        if step == steps or step % 10 == 0:
            tqdm.write(f"warm start {step}/{steps} | loss {loss:.3f} nats a token | grad {norm:.2f} | {row['time']:.1f} s")
        if due(step, cfg.train.save_every, steps):
            trainer = {"step": step} | ({} if step == steps else {"optimizer": optimizer.state_dict()})
            policy.save(model, tokenizer, folder, trainer)
    model.eval()
    optimizer.state.clear()


def draw(n: int, cursor: int, count: int, seed: int) -> list[int]:
    """Indices of the next `count` of n tasks: position cursor in an endless row of permutations, one an epoch."""
    orders: dict[int, list[int]] = {}
    for epoch in range(cursor // n, (cursor + count - 1) // n + 1):
        orders[epoch] = random.Random(stream(seed, epoch)).sample(range(n), n)
    return [orders[i // n][i % n] for i in range(cursor, cursor + count)]


def advantages(rollouts: list[Rollout], weights: dict[str, float], cfg: SimpleNamespace) -> dict[str, float]:
    """Sets `advantage` and `live` of every scored rollout; returns the metrics of rewards, correlations and advantages."""
    scored = [r for r in rollouts if r.error is None]
    errors = [r.error for r in rollouts if r.error is not None]
    if errors:
        tqdm.write(f"{len(errors)} of {len(rollouts)} rollouts have no score and are left out; the first: {errors[0]}")
    if len(errors) > cfg.env.max_errors * len(rollouts):
        raise RunError(f"{len(errors)} of {len(rollouts)} rollouts have no score, more than env.max_errors = "
                       f"{cfg.env.max_errors} allows; the first: {errors[0]}")
    lengths = [sum(r.trained) for r in rollouts]
    metrics = {"rollouts/errors": len(errors), "response/length": sum(lengths) / len(lengths),
               "response/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts)}
    if not scored:
        return metrics
    names = list(weights)
    rewards = torch.tensor([[float(r.score.rewards[name]) for name in names] for r in scored], dtype=torch.float64)
    groups = torch.tensor([r.group for r in scored])
    w = torch.tensor(list(weights.values()), dtype=torch.float64)
    advantage = corrgrpo.ESTIMATORS[cfg.algo.advantage](rewards, groups, w, cfg.algo.eps)
    divided_by = corrgrpo.denominators(rewards, groups, w)
    live, bound = divided_by["live"], torch.tensor(cfg.algo.advantage_clip or math.inf, dtype=torch.float64)
    if cfg.algo.advantage == "corrgrpo" and cfg.algo.max_multiplier:
        bound = bound.minimum(cfg.algo.max_multiplier * group_max(corrgrpo.dr_grpo(rewards, groups, w), groups))
    largest = group_max(advantage, groups)
    clipped = largest > bound * (1 + 1e-9)
    advantage = torch.where(clipped, advantage * (bound / largest), advantage)  # the whole group: its mean stays 0
    for r, a, alive in zip(scored, advantage.tolist(), live.tolist()):
        r.advantage, r.live = a, alive

    first = groups.diff(prepend=groups[:1] - 1) != 0            # one rollout of each group: rollouts come group by group
    _, same = (rewards * w).unique(dim=0, return_counts=True)
    metrics |= {
        "reward/total": (rewards @ w).mean().item(),
        "advantage/abs_mean": advantage.abs().mean().item(),
        "advantage/clipped": clipped.sum().item(),
        "groups/live": live[first].double().mean().item(),
        # the share of dead groups if every rollout drew its rewards from this batch: sum of p^G over the distinct rows
        "groups/dead_expected": (same / len(scored)).pow(cfg.train.group_size).sum().item(),
    }
    metrics |= environment_metrics(scored)
    if live.any():
        metrics |= {f"denominator/{name}": divided_by[name][first & live].mean().item() for name in ("grpo", "corrgrpo")}
    rho = corrgrpo.reward_correlation(rewards, groups)
    varies = rho.diagonal(dim1=1, dim2=2) > 0.5                 # [groups, K]: the diagonal is 1, or 0 where constant
    for i, name in enumerate(names):
        deviation = corrgrpo.denominators(rewards[:, i : i + 1], groups)["grpo"][first]
        metrics |= {f"reward/{name}": rewards[:, i].mean().item(), f"reward_std/{name}": deviation.mean().item(),
                    f"groups/constant/{name}": 1 - varies[:, i].double().mean().item()}
        for j in range(i + 1, len(names)):
            both = varies[:, i] & varies[:, j]
            if both.any():                                      # no group has the correlation: no key, never a NaN
                metrics[f"correlation/{name}/{names[j]}"] = rho[both, i, j].mean().item()
    return metrics


def group_max(values: Tensor, groups: Tensor) -> Tensor:
    """[N]: the largest |value| of each rollout's group."""
    return torch.zeros(int(groups.max()) + 1, dtype=values.dtype).scatter_reduce(0, groups, values.abs(), "amax")[groups]


def environment_metrics(scored: list[Rollout]) -> dict[str, float]:
    """The environment's own metrics: means of numbers (None left out), shares of the values of words."""
    out = {}
    for name in {name: None for r in scored for name in r.score.metrics}:
        values = [r.score.metrics.get(name) for r in scored]
        numbers = [float(v) for v in values if isinstance(v, int | float)]
        if numbers:
            out[f"env/{name}"] = sum(numbers) / len(numbers)
        for word, count in collections.Counter(v for v in values if isinstance(v, str)).items():
            out[f"env/{name}/{word}"] = count / len(scored)
    return out


def update(model, reference, optimizer, rollouts: list[Rollout], state: dict, cfg: SimpleNamespace) -> dict[str, float]:
    """`train.updates_per_step` optimizer steps on the rollouts, each on its share of the groups; returns their metrics."""
    used = [r for r in rollouts if r.error is None and r.ids and (r.live or cfg.algo.train_dead_groups)
            and not (cfg.algo.mask_truncated and r.finish_reason == "length")]
    groups = [list(g) for _, g in itertools.groupby(used, key=lambda r: r.group)]
    per_update = max(1, math.ceil(len(groups) / cfg.train.updates_per_step))
    size = cfg.train.micro_batch_size
    updates = [[group[i : i + size] for group in groups[u : u + per_update] for i in range(0, len(group), size)]
               for u in range(0, len(groups), per_update)]
    if not updates:
        tqdm.write("no update: no rollout is left whose group has rewards that vary")
        return {"loss": 0.0, "update/tokens": 0, "update/skipped": state["skipped"]}
    model.train(cfg.model.gradient_checkpointing)               # there is no dropout; only checkpointing asks for it
    before = {}
    if len(updates) > 1:
        with torch.no_grad():
            before = {id(batch): log_probs(model, batch, cfg) for batches in updates for batch in batches}
    sums, norms = collections.Counter(), []
    for batches in updates:
        # Counted first, over the whole update: gradients must not depend on how it is cut into micro-batches.
        tokens, count = sum(sum(r.trained) for b in batches for r in b), sum(map(len, batches))
        for batch in batches:
            log_p = log_probs(model, batch, cfg)                # [T]: the sampled tokens of the batch's rollouts
            old = before.get(id(batch), log_p.detach())
            lengths = torch.tensor([sum(r.trained) for r in batch])
            each = torch.full((len(batch),), 1 / tokens) if cfg.algo.aggregation == "token" else 1 / (count * lengths)
            advantage, share = (x.repeat_interleave(lengths).to(log_p.device)
                                for x in (torch.tensor([r.advantage for r in batch]), each))
            sampled = torch.tensor([lp for r in batch for lp, own in zip(r.log_probs, r.trained) if own]).to(log_p.device)
            loss, stats = token_loss(log_p, old, sampled, advantage, cfg.algo)
            if reference is not None:
                with torch.no_grad():
                    ref = log_probs(reference, batch, cfg)
                kl = kl_k3(log_p, ref)
                loss = loss + cfg.algo.kl * kl
                stats["kl"] = kl.detach().sum()
            loss = (loss * share).sum()
            loss.backward()
            difference = (old - sampled).abs()
            sums.update({name: value.item() for name, value in stats.items()} | {"loss": loss.item() / len(updates),
                        "difference": difference.sum().item(), "entropy": -sampled.sum().item(), "tokens": len(log_p)})
            sums["difference/max"] = max(sums["difference/max"], difference.max().item())
        if sums["difference"] > cfg.sampler.max_logprob_diff * sums["tokens"]:
            raise RunError(f"sampler and trainer disagree on the log-probabilities of the sampled tokens by "
                           f"{sums['difference'] / sums['tokens']:.2f} nats on average (sampler.max_logprob_diff = "
                           f"{cfg.sampler.max_logprob_diff}). The sampler's weights are stale, or the model's attention "
                           "takes no 4-D mask: try model.share_prompt=false, then sampler.dtype=float32")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.max_grad_norm or float("inf")).item()
        if math.isfinite(norm):
            optimizer.step()
            norms.append(norm)
            state["skipped_in_a_row"] = 0
        else:
            state["skipped"] += 1
            state["skipped_in_a_row"] += 1
            tqdm.write(f"update skipped: the gradient norm is {norm} ({state['skipped']} so far)")
        optimizer.zero_grad(set_to_none=True)
        if state["skipped_in_a_row"] >= cfg.train.max_skipped:
            raise RunError(f"{state['skipped_in_a_row']} updates in a row had a gradient norm that is not finite; the last "
                           "checkpoint is from before. Lower train.learning_rate or algo.advantage_clip")
    model.eval()
    metrics = {name: sums[name] / sums["tokens"] for name in ("clip_fraction", "importance/truncated", "entropy")}
    metrics |= {"loss": sums["loss"], "logprob_diff/mean": sums["difference"] / sums["tokens"],
                "logprob_diff/max": sums["difference/max"], "update/tokens": sums["tokens"], "update/skipped": state["skipped"]}
    if norms:
        metrics["grad_norm"] = sum(norms) / len(norms)
    if reference is not None:
        metrics["kl"] = sums["kl"] / sums["tokens"]
    return metrics


def log_probs(model, batch: list[Rollout], cfg: SimpleNamespace) -> Tensor:
    """[T] log-probabilities of the sampled tokens of rollouts that share a prompt; the environment's tokens are left out
    before anything is computed from them."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=cfg.model.dtype == "bfloat16"):
        log_p = policy.log_probs(model, batch[0].prompt, [r.ids for r in batch], temperature=cfg.sampler.temperature,
                                 share_prompt=cfg.model.share_prompt)
    return log_p[torch.tensor([own for r in batch for own in r.trained], device=log_p.device)]


def token_loss(log_p: Tensor, old: Tensor, sampled: Tensor, advantage: Tensor, algo) -> tuple[Tensor, dict[str, Tensor]]:
    """[T] losses: -w * min(r A, clip(r) A). r = exp(log_p - old) is the probability ratio to the policy before the step's
    updates, w = min(exp(old - sampled), algo.importance_cap) weighs the sampler's distribution away, without gradient."""
    ratio = (log_p - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    importance = (old - sampled).clamp(-20, 20).exp() if algo.importance_cap else torch.ones_like(old)
    capped = importance.clamp(max=algo.importance_cap or 1.0)
    return -capped * surrogate, {"clip_fraction": (clipped * advantage < ratio * advantage).sum(),
                                 "importance/truncated": (importance > capped).sum()}


def kl_k3(log_p: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy, reference) per token, r - 1 - log r with r = reference / policy: never negative,
    0 where equal, unbiased for tokens drawn from the policy."""
    log_r = (reference - log_p).clamp(-20, 20)
    return log_r.exp() - 1 - log_r


def evaluate(run: SimpleNamespace, sampler, tokenizer, tasks: list, logs: RunFolder, step: int) -> None:
    """One greedy reply to every held-out task; a row in eval.jsonl."""
    cfg, start = run.cfg, time.perf_counter()
    with tqdm(total=len(tasks), desc="evaluation", leave=False, disable=None) as bar:
        rollouts = collect(run.env, sampler, tokenizer, tasks, 1, seeds=[0] * len(tasks), temperature=0.0,
                           max_new_tokens=cfg.sampler.max_new_tokens, max_tokens=sampler.context,
                           max_response_tokens=cfg.sampler.max_response_tokens, progress=bar.update)
    score(run.env, rollouts)
    scored = [r for r in rollouts if r.error is None]
    row = {"step": step, "tasks": len(rollouts), "errors": len(rollouts) - len(scored)}
    if scored:
        means = {name: sum(r.score.rewards[name] for r in scored) / len(scored) for name in run.weights}
        row |= {"reward/total": sum(run.weights[name] * mean for name, mean in means.items()),
                **{f"reward/{name}": mean for name, mean in means.items()}, **environment_metrics(scored),
                "response/length": sum(sum(r.trained) for r in rollouts) / len(rollouts)}
    logs.metrics(row, "eval.jsonl")
    tqdm.write(f"held-out tasks after step {step}: total reward {row.get('reward/total', float('nan')):.3f} "
               f"({time.perf_counter() - start:.0f} s)")


def fitting(tasks: list, tokenizer, limit: int, what: str) -> list[tuple]:
    """(task, prompt tokens) of those whose prompt has at most `limit` tokens; says how many have more."""
    encoded = [(task, encode(tokenizer, task)) for task in tqdm(tasks, desc=f"{what} prompts", leave=False, disable=None)]
    kept = [(task, prompt) for task, prompt in encoded if len(prompt) <= limit]
    if len(kept) < len(encoded):
        print(f"{len(encoded) - len(kept)} of {len(encoded)} {what} prompts are longer than {limit} tokens "
              "(sampler.max_prompt_tokens, or what the model's context leaves) and are skipped", flush=True)
    if not kept:
        raise RunError(f"no {what} prompt has at most {limit} tokens: raise sampler.max_prompt_tokens")
    return kept


def save_checkpoint(folder: Path, model, tokenizer, optimizer, state: dict, keep: int) -> None:
    """checkpoints/step-N in Hugging Face format with trainer.pt beside the weights; the oldest beyond `keep` go."""
    policy.save(model, tokenizer, folder / "checkpoints" / f"step-{state['step']:06d}",
                {"optimizer": optimizer.state_dict(), **state})
    for old in prepare.checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def stopwatch():
    """lap(): seconds since the last lap."""
    last = [time.perf_counter()]

    def lap() -> float:
        now = time.perf_counter()
        seconds, last[0] = now - last[0], now
        return seconds

    return lap


def peak_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


if __name__ == "__main__":
    sys.exit(main())
