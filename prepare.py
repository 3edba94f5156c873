"""What comes before a run: the configuration with its overrides, and every check of the input that needs no model."""

import argparse
import fcntl
import math
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import tomli_w
import torch

import config
import envs
import policy
from logs import replace
from sampler import choose


def settings(args: argparse.Namespace) -> SimpleNamespace:
    """The configuration; on --resume without --config the run's own, and a line for every key that differs from it."""
    cfg = config.read(args.config, args.preset, args.overrides)
    stored = Path(cfg.log.dir) / cfg.log.name / "config.toml"
    if args.resume and stored.is_file():
        if not args.config:
            cfg = config.read(stored, args.preset, args.overrides)
        before = config.tables(config.read(stored))
        for section, table in config.tables(cfg).items():
            for key, value in table.items():
                if value != before[section].get(key, value) and value != "auto":
                    print(f"resuming with {section}.{key} = {value!r}, which was {before[section][key]!r}")
    return cfg


def prepare(cfg: SimpleNamespace, resume: bool) -> SimpleNamespace:
    """Everything that can be wrong with the input is found here, before a model is loaded. Raises ValueError or OSError."""
    env_class = envs.find(cfg.env.name)
    env = env_class(**config.environment_arguments(cfg, env_class))
    for name, weight in cfg.env.reward_weights.items():
        if name not in env.reward_names:
            raise ValueError(f"env.reward_weights names {name!r}; {cfg.env.name} has {', '.join(env.reward_names)}")
        if type(weight) not in (int, float) or not math.isfinite(weight):
            raise ValueError(f"env.reward_weights: the weight of {name} must be a number, not {weight!r}")
    if len(env.reward_names) != len(env.reward_weights):
        raise ValueError(f"{cfg.env.name} has {len(env.reward_names)} reward_names, {len(env.reward_weights)} reward_weights")
    weights = dict(zip(env.reward_names, env.reward_weights)) | cfg.env.reward_weights
    tasks = env.tasks(cfg.env.split)
    if not tasks:
        raise ValueError(f"{cfg.env.name} has no tasks in its split {cfg.env.split!r} (env.split)")
    eval_tasks = held_out(env, tasks, cfg.eval.split)
    if cfg.train.warm_start_steps and not (hasattr(env, "reference") and any(env.reference(task) for task in tasks)):
        raise ValueError(f"train.warm_start_steps needs reference replies: {cfg.env.name} has no reference(task)")
    cfg.model.name = str(Path(cfg.model.name).resolve()) if Path(cfg.model.name).is_dir() else cfg.model.name
    policy.find(cfg.model.name)
    if cfg.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device = 'cuda': torch sees no GPU here")
    choose(cfg.sampler.engine, cfg.model.device)
    if not cfg.log.name:
        if resume:
            raise ValueError("--resume needs log.name=NAME, the folder of the run under log.dir")
        cfg.log.name = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(cfg.log.dir) / cfg.log.name
    if resume and not folder.is_dir():
        raise ValueError(f"--resume: there is no run folder {folder}")
    begun = folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - {"lock", "config.toml"})
    if begun and not resume:
        raise ValueError(f"the run folder {folder} is not empty: choose another log.name, or go on with --resume")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")                   # noqa: SIM115 (held until this process ends, however it ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is writing to the run folder {folder}") from None
    if not begun:
        replace(folder / "config.toml", tomli_w.dumps(config.tables(cfg)))      # so early for a --resume after an early kill
    return SimpleNamespace(cfg=cfg, env=env, weights=weights, tasks=tasks, eval_tasks=eval_tasks, folder=folder, lock=lock,
                           checkpoint=next(reversed(checkpoints(folder)), None))    # None: killed before the first, so anew


def held_out(env, tasks: list, split: str) -> list:
    """The evaluation's tasks, less those that are trained on."""
    if not split:
        return []
    try:
        every = env.tasks(split)
    except (ValueError, OSError, KeyError) as e:
        raise ValueError(f"eval.split = {split!r} cannot be had ({e}); eval.split=\"\" trains without evaluation") from None
    trained = {key for task in tasks for key in (task.id, str(task.messages))}
    kept = [task for task in every if task.id not in trained and str(task.messages) not in trained]
    if len(kept) < len(every):
        print(f"{len(every) - len(kept)} of {len(every)} tasks of eval.split = {split!r} are trained on: not evaluated")
    return kept


def checkpoints(folder: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(p for p in folder.glob("checkpoints/step-*") if p.name.removeprefix("step-").isdigit())
