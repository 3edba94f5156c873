"""What eval.py makes of its samples: measures with intervals, tables, paired comparisons of runs, plots.

A sample is a record of samples.jsonl: id, sample, prompt, replies, rewards, metrics, error. `measures` turns it into named
numbers, None where it does not count for one. A measure's value is the mean over tasks of the mean over a task's samples.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from logs import read_jsonl, smooth

# Okabe and Ito's colours, told apart by the colour-blind; with a marker for each, since prints are grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


def per_task(env, samples: list[dict]) -> dict[str, dict[str, float]]:
    """{measure: {task id: mean over its scored samples}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        if sample["error"] is None:
            for name, value in measures(env, sample).items():
                if value is not None:
                    found.setdefault(name, {}).setdefault(sample["id"], []).append(float(value))
    return {name: {task: sum(v) / len(v) for task, v in tasks.items()} for name, tasks in found.items()}


def measures(env, sample: dict) -> dict[str, float | None]:
    """The environment's own, or else its rewards and whatever of its metrics is a number."""
    if hasattr(env, "measures"):
        return env.measures(sample)
    return {**sample["rewards"], **{k: v for k, v in sample["metrics"].items() if isinstance(v, int | float) or v is None}}


def summarize(env, samples: list[dict], seed: int = 0) -> dict[str, Any]:
    """{"measures": {name: {value, low, high, n}}, "tasks", "samples", "errors", "per_task"}; values in percent where all lie in
    [0, 1]. low and high bound the 95 % interval: Wilson's where every task counts 0 or 1, else a bootstrap over tasks."""
    values = per_task(env, samples)
    plain = getattr(env, "plain", ())                   # means that are no shares, whatever their values
    out = {name: interval(list(tasks.values()), seed, name not in plain) for name, tasks in values.items()}
    for name, parts in getattr(env, "averages", {}).items():
        if found := [out[part]["value"] for part in parts if part in out]:
            out[name] = {"value": sum(found) / len(found), "n": len(found)}
    counts: dict[str, list[float]] = {}
    for sample in samples:
        if sample["error"] is None and "pass" in sample["rewards"]:
            counts.setdefault(sample["id"], []).append(sample["rewards"]["pass"])
    k = 2
    while counts and all(len(c) >= k for c in counts.values()):     # pass@1 is the mean itself
        values[f"Pass@{k}"] = {task: pass_at_k(len(c), round(sum(c)), k) for task, c in counts.items()}
        out[f"Pass@{k}"] = interval(list(values[f"Pass@{k}"].values()), seed)
        k *= 2
    return {"measures": out, "tasks": len({s["id"] for s in samples}), "samples": len(samples),
            "errors": sum(s["error"] is not None for s in samples), "per_task": values}


def interval(values: list[float], seed: int = 0, share: bool = True) -> dict[str, float]:
    share = share and all(0 <= v <= 1 for v in values)
    scale = 100.0 if share else 1.0
    n, mean = len(values), sum(values) / len(values)
    counted = {"n": n, "scale": scale}
    if share and set(values) <= {0.0, 1.0}:
        counted["k"] = round(sum(values))
        low, high = stats.binomtest(round(sum(values)), n).proportion_ci(0.95, "wilson")
    elif len(set(values)) == 1:
        low = high = mean
    else:
        low, high = stats.bootstrap((np.array(values),), np.mean, n_resamples=2000, method="percentile",
                                    rng=np.random.default_rng(seed)).confidence_interval
    return {"value": scale * mean, "low": scale * float(low), "high": scale * float(high), **counted}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k of the n samples is correct, without bias (Chen et al. 2021): 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def paired(first: dict[str, float], second: dict[str, float], seed: int = 0) -> dict[str, Any]:
    """second - first over the tasks that both have: difference, p and the test: McNemar's exact where every task counts 0 or 1,
    else a paired bootstrap (twice the smaller share of resampled means on one side of 0); under 20 tasks, where that finds
    differences that are none, Fisher's permutation test, which turns the signs."""
    tasks = sorted(first.keys() & second.keys())
    difference = np.array([second[t] - first[t] for t in tasks])
    out = {"n": len(tasks), "difference": float(difference.mean()) if tasks else math.nan}
    if all(v in (0.0, 1.0) for t in tasks for v in (first[t], second[t])):
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        return out | {"p": float(p), "test": "McNemar"}
    if len(tasks) < 20:
        p = stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=5000,
                                   rng=np.random.default_rng(seed)).pvalue
        return out | {"p": float(p), "test": "permutation"}
    means = np.random.default_rng(seed).choice(difference, (4000, len(tasks))).mean(1)
    fewer = min((means <= 0).sum(), (means >= 0).sum())
    return out | {"p": float(min(1.0, 2 * (fewer + 1) / 4001)), "test": "paired bootstrap"}


# ---------------------------------------------------------------- tables


def cell(m: dict[str, float]) -> str:
    bounds = f" [{m['low']:.1f}, {m['high']:.1f}]" if "low" in m else ""
    return f"{m['value']:.2f}{bounds} {m['k']}/{m['n']}" if "k" in m else f"{m['value']:.2f}{bounds}"


def table(runs: dict[str, dict[str, dict]]) -> str:
    """Markdown, one table a benchmark. runs: {name: {benchmark: summary}}; every run after the first gets a line of differences
    to the first."""
    blocks = []
    for benchmark in dict.fromkeys(b for run in runs.values() for b in run):
        rows = {name: run[benchmark] for name, run in runs.items() if benchmark in run}
        columns = list(dict.fromkeys(m for s in rows.values() for m in s["measures"]))
        sizes = ", ".join(sorted({str(s["tasks"]) for s in rows.values()}))
        grid = [["model", *columns]]
        base = next(iter(rows))
        for name, summary in rows.items():
            grid.append([name, *(cell(summary["measures"][c]) if c in summary["measures"] else "" for c in columns)])
            if name != base:
                cells = []
                for c in columns:
                    tasks = [rows[x]["per_task"].get(c) for x in (base, name)]
                    means = [rows[x]["measures"].get(c) for x in (base, name)]
                    d = paired(*tasks) if all(tasks) else {"n": 0}
                    if d["n"]:
                        cells.append(f"{means[1]['scale'] * d['difference']:+.2f} (p = {d['p']:.2g})")
                    else:                               # a mean of other means, or of rounds: no tasks to pair
                        cells.append(f"{means[1]['value'] - means[0]['value']:+.2f}" if all(means) and not any(tasks) else "")
                grid.append([f"{name} - {base}", *cells])
        if len(columns) > 12:                               # many measures: one a line
            grid = [["measure", *grid[0][1:]], *grid[1:]]
            grid = list(zip(*grid))
        lines = [f"**{benchmark}** ({sizes} tasks; percent, 95 % intervals; of Efficiency the spread of its rounds)", "",
                 *(f"| {' | '.join(row)} |" for row in grid)]
        lines.insert(3, "|---" * len(grid[0]) + "|")
        lines += list(dict.fromkeys(f"\n{key}: {note}" for s in rows.values() for key, note in s.get("notes", {}).items()
                                    if isinstance(note, str)))
        lines += [f"\n{s['errors']} of {s['samples']} samples of {name} have no score and are left out"
                  for name, s in rows.items() if s["errors"]]
        blocks.append("\n".join(lines))
    if averages := average_pass(runs):
        blocks.append("**Average Pass@1 over the code benchmarks**\n\n" + "\n".join(averages))
    if len(runs) > 1:
        blocks.append("Differences with a p are over the tasks that both answered; p from McNemar's exact test where a task "
                      "counts 0 or 1, from a paired bootstrap elsewhere (a permutation test under 20 tasks).")
    return "\n\n".join(blocks) + "\n"


def average_pass(runs: dict[str, dict[str, dict]]) -> list[str]:
    lines = []
    for name, run in runs.items():
        found = {b: s["measures"]["Pass@1"]["value"] for b, s in run.items() if "Pass@1" in s["measures"]}
        if len(found) > 1:
            lines.append(f"- {name}: {sum(found.values()) / len(found):.2f} ({', '.join(found)})")
    return lines


# ---------------------------------------------------------------- plots


def plots(runs: dict[str, dict[str, dict]], training: dict[str, list[dict]], folder: Path) -> list[Path]:
    """PNG and SVG of whatever there is: correctness against efficiency, utility against security, training curves."""
    made = []
    code = {name: (run[b]["measures"]["Pass@1"], run[b]["measures"]["Efficiency"]) for name, run in runs.items()
            for b in ("leetcode", "starter") if "Efficiency" in run.get(b, {}).get("measures", {})}
    made += scatter(code, "Pass@1 (%)", "efficiency: strictly faster than the reference (%)", folder / "correctness_efficiency")
    agents = {}
    for name, run in runs.items():
        m = run.get("agentdojo", {}).get("measures", {})
        if "utility under attack" in m and "attack success" in m:
            a = m["attack success"]
            safe = {"value": 100 - a["value"], "low": 100 - a["high"], "high": 100 - a["low"]}
            agents[name] = (m["utility under attack"], safe)
    made += scatter(agents, "utility under attack (%)", "security: attacks that fail (%)", folder / "utility_security")
    return made + curves(training, folder / "training")


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, from left to right."""
    best, frontier = -math.inf, []
    for x, y in sorted(points, reverse=True):
        if y > best:
            best = y
            frontier.append((x, y))
    return frontier[::-1]


def scatter(points: dict[str, tuple[dict, dict]], x: str, y: str, file: Path) -> list[Path]:
    if not points:
        return []
    figure, axes = _figure()
    for i, (name, (a, b)) in enumerate(points.items()):
        error = [[[m["value"] - m["low"]], [m["high"] - m["value"]]] for m in (a, b)]
        axes.errorbar(a["value"], b["value"], xerr=error[0], yerr=error[1], fmt=MARKERS[i % 7], color=COLORS[i % 7],
                      markersize=9, elinewidth=0.8, capsize=2, label=name)
    frontier = pareto((a["value"], b["value"]) for a, b in points.values())
    axes.step(*zip(*frontier), where="post", color="0.4", linestyle="--", linewidth=1, label="Pareto frontier")
    axes.set(xlabel=x, ylabel=y)
    return _save(figure, axes, file)


def curves(training: dict[str, list[dict]], file: Path, smoothing: float = 0.8) -> list[Path]:
    """Total reward over steps: thin as measured, thick a running mean."""
    training = {name: rows for name, rows in training.items() if any("reward/total" in r for r in rows)}
    if not training:
        return []
    figure, axes = _figure()
    for i, (name, rows) in enumerate(training.items()):
        steps, values = zip(*((r["step"], r["reward/total"]) for r in rows if "reward/total" in r))
        axes.plot(steps, values, color=COLORS[i % 7], alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(values, smoothing), color=COLORS[i % 7], marker=MARKERS[i % 7],
                  markevery=max(1, len(steps) // 10), label=name)
    axes.set(xlabel="step", ylabel="total reward")
    return _save(figure, axes, file)


def _figure():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    return figure, figure.subplots()


def _save(figure, axes, file: Path) -> list[Path]:
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    files = [file.with_suffix(suffix) for suffix in (".png", ".svg")]
    for f in files:
        figure.savefig(f, dpi=150)
    return files


# ---------------------------------------------------------------- runs on disk


def read_run(folder: Path) -> tuple[dict[str, dict], list[dict]]:
    """({benchmark: its summary}, the rows of a training run's metrics.jsonl)."""
    return ({f.parent.name: json.loads(f.read_text()) for f in sorted(folder.glob("*/summary.json"))},
            read_jsonl(folder / "metrics.jsonl"))
