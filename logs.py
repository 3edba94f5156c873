"""What a run leaves on disk and prints: metrics.jsonl, TensorBoard events, rollouts, plots/dynamics.png, a line per step.

Files that are rewritten are written beside their place and renamed.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w

from rollout import Rollout


class RunFolder:
    """runs/NAME. On resume, what lies after the checkpoint's step is dropped, since it will happen again."""

    def __init__(self, folder: Path, config: dict, step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        for part in [*folder.glob("*.part*"), *folder.glob("checkpoints/*.part*")]:    # what a kill cut off
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        replace(folder / "config.toml", tomli_w.dumps(config))
        for name in ("metrics.jsonl", "eval.jsonl"):
            self.cut(name, step)
        for file in (folder / "rollouts").glob("step-*.jsonl"):
            if int(file.stem.split("-")[1]) > step:
                file.unlink()
        if step == 0 and not (folder / "warm_start.jsonl").exists():
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self.board = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)

    def cut(self, name: str, step: int) -> None:
        """Drop the rows after a step."""
        rows = [row for row in read_jsonl(self.folder / name) if row["step"] <= step]
        replace(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def metrics(self, row: dict[str, Any], name: str = "metrics.jsonl") -> None:
        row = {key: value for key, value in row.items() if not (isinstance(value, float) and not math.isfinite(value))}
        with open(self.folder / name, "a") as f:
            f.write(json.dumps(row) + "\n")
        prefix = "" if name == "metrics.jsonl" else name.removesuffix("jsonl").replace(".", "/")
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.board.add_scalar(prefix + key, value, row["step"])
        self.board.flush()

    def rollouts(self, step: int, rollouts: list[Rollout]) -> None:
        replace(self.folder / "rollouts" / f"step-{step:06d}.jsonl", "".join(json.dumps({
            "step": step, "group": r.group, "task": r.task.id, "prompt": r.task.messages, "replies": r.replies,
            "tokens": sum(r.trained), "finish_reason": r.finish_reason, "advantage": r.advantage, "live": r.live,
            "rewards": r.score.rewards if r.score else None, "metrics": r.score.metrics if r.score else None,
            "error": r.error}, default=str) + "\n" for r in rollouts))


def read_jsonl(file: Path) -> list[dict]:
    """The rows of a jsonl file, [] if there is none; a last line cut off by a kill is dropped."""
    rows = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else []:      # splitlines has other ends too
        try:
            rows += [json.loads(line)] if line else []
        except ValueError:
            break
    return rows


def replace(file: Path, text: str) -> None:
    """Write beside, then rename: a kill leaves the old file or the new one."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def smooth(values: Iterable[float], weight: float) -> list[float]:
    """The running mean with weight `weight` on the past, corrected for its start."""
    mean, norm, out = 0.0, 0.0, []
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def plot_dynamics(folder: Path, reward_names: tuple[str, ...], smoothing: float) -> None:
    """plots/dynamics.png of a run folder. Six panels: total reward, components, advantage, denominators and response length
    over steps, and the correlations. Thin lines are the values, thick ones their running mean (`smooth`)."""
    from matplotlib.figure import Figure

    rows, file = read_jsonl(folder / "metrics.jsonl"), folder / "plots" / "dynamics.png"
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = figure.subplots(2, 3).flat

    def curves(title: str, keys: dict[str, str]) -> None:
        axes = next(panels)
        axes.set(title=title, xlabel="step")
        for i, (key, label) in enumerate(keys.items()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            steps, values = zip(*points)
            axes.plot(steps, values, color=f"C{i % 10}", alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(values, smoothing), color=f"C{i % 10}", linewidth=1.8, label=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)

    curves("total reward (weighted)", {"reward/total": "mean total"})
    curves("components (before weights)", {f"reward/{name}": name for name in reward_names})
    curves("advantage", {"advantage/abs_mean": "mean |A|", "groups/live": "live groups (share)"})
    curves("what the centred reward is divided by", {"denominator/corrgrpo": "CorrGRPO: root of summed correlations",
                                                     "denominator/grpo": "GRPO: deviation of the total"})
    curves("response length (tokens)", {"response/length": "mean"})
    fifth = -(-len(rows) // 5)
    axes, size = next(panels), len(reward_names)
    axes.set(title="correlations, first fifth of the steps (below), last (above)", xticks=range(size), yticks=range(size))
    axes.set_xticklabels(reward_names, rotation=30)
    axes.set_yticklabels(reward_names)
    image = [[float("nan")] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            for part, (y, x) in ((rows[:fifth], (j, i)), (rows[-fifth:], (i, j))):
                values = [row[key] for row in part if (key := f"correlation/{reward_names[i]}/{reward_names[j]}") in row]
                if values:
                    image[y][x] = sum(values) / len(values)
                    axes.text(x, y, f"{image[y][x]:.2f}", ha="center", va="center", fontsize=8,
                              color="white" if abs(image[y][x]) > 0.7 else "black")
    axes.imshow(image, vmin=-1, vmax=1, cmap="RdBu")
    file.parent.mkdir(exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    figure.savefig(part, format="png", dpi=110)
    os.replace(part, file)


def line(step: int, steps: int, m: dict[str, float]) -> str:
    """What a step did, in one line."""
    def show(label: str, key: str, form: str) -> str:
        return f"{label} {m[key]:{form}}" if key in m else f"{label} -"

    return " | ".join([
        f"step {step:{len(str(steps))}d}/{steps}", show("reward", "reward/total", ".3f"),
        show("|A|", "advantage/abs_mean", ".2f"),
        show("live", "groups/live", ".2f") + f" ({1 - m.get('groups/dead_expected', math.nan):.2f} expected)",
        show("loss", "loss", "+.3f"), show("grad", "grad_norm", ".2f"), show("tokens", "response/length", ".0f"),
        show("diff", "logprob_diff/mean", ".3f"), f"errors {m['rollouts/errors']}",
        " ".join(f"{p} {m[f'time/{p}']:.1f}s" for p in ("sample", "score", "update", "sync")),
        f"{m['tokens_per_second']:.0f} tok/s"])


def comparison(rows: list[dict], names: tuple[str, ...]) -> str:
    """A table of the first and the last evaluation."""
    first, last = rows[0], rows[-1]
    lines = [f"held-out tasks, greedy      step {first['step']:4d}   step {last['step']:4d}"]
    lines += [f"  {key:24s} {first[f'reward/{key}']:10.3f}  {last[f'reward/{key}']:10.3f}" for key in ("total", *names)
              if f"reward/{key}" in first and f"reward/{key}" in last]
    lines += [f"  {key.removeprefix('env/'):24s} {first[key]:10.3f}  {last[key]:10.3f}" for key in first
              if key.startswith("env/") and key in last]
    return "\n".join(lines)
