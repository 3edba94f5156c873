"""The strict TOML reader. config.toml beside this file is the embedded default: it defines every key and its type.

`read` lays, in this order: the defaults, the user's file, a preset's tables, command-line overrides: what is typed wins.
An unknown key, a wrong type or a value out of range raises ConfigError, naming key, section, what is allowed and the
nearest known key, before anything is loaded.
"""

import difflib
import inspect
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEFAULTS = Path(__file__).with_name("config.toml")
ENV_KEYS = ("name", "split", "reward_weights", "max_errors")      # of [env]; the rest are the environment's arguments

# Allowed values: a tuple of choices, or (lowest, highest) in a list, None for no bound.
ALLOWED: dict[str, tuple | list] = {
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.device": ("auto", "cpu", "cuda"),
    "sampler.engine": ("auto", "transformers", "vllm"),
    "sampler.dtype": ("auto", "bfloat16", "float32"),
    "sampler.max_new_tokens": [1, None],
    "sampler.max_response_tokens": [0, None],
    "sampler.max_prompt_tokens": [1, None],
    "sampler.temperature": [0.01, 100.0],
    "sampler.top_p": (1.0,),
    "sampler.top_k": (0,),
    "sampler.batch_size": [1, None],
    "sampler.max_logprob_diff": [0.0, None],
    "sampler.max_sync_diff_float32": [0.0, None],
    "sampler.max_sync_diff_bfloat16": [0.0, None],
    "sampler.kv_cache_gb": [0.001, None],
    "sampler.gpu_memory_utilization": [0.01, 1.0],
    "env.max_errors": [0.0, 1.0],
    "env.timeout": [0.01, None],
    "env.memory_mb": [16, None],
    "env.workers": [0, None],
    "env.sandbox": ("auto", "strict"),
    "algo.advantage": ("corrgrpo", "grpo", "gdpo", "dr_grpo", "rloo"),
    "algo.eps": [1e-12, None],
    "algo.advantage_clip": [0.0, None],
    "algo.max_multiplier": [0.0, None],
    "algo.clip_low": [0.0, 1.0],
    "algo.clip_high": [0.0, None],
    "algo.kl": [0.0, None],
    "algo.importance_cap": [0.0, None],
    "algo.aggregation": ("token", "sequence"),
    "train.warm_start_steps": [0, None],
    "train.warm_start_rows": [1, None],
    "train.warm_start_learning_rate": [0.0, 1.0],
    "train.steps": [1, None],
    "train.prompts_per_step": [1, None],
    "train.group_size": [2, None],
    "train.micro_batch_size": [1, None],
    "train.updates_per_step": [1, None],
    "train.learning_rate": [0.0, 1.0],
    "train.learning_rate_decay": [0.0, 1.0],
    "train.warmup_steps": [0, None],
    "train.weight_decay": [0.0, None],
    "train.beta1": [0.0, 0.9999999],
    "train.beta2": [0.0, 0.9999999],
    "train.max_grad_norm": [0.0, None],
    "train.max_skipped": [1, None],
    "train.seed": [0, 2**63 - 1],
    "train.save_every": [0, None],
    "train.keep_checkpoints": [1, None],
    "train.threads": [0, None],
    "eval.every": [0, None],
    "eval.limit": [0, None],
    "log.smoothing": [0.0, 0.999],
}
CUT = ("a sampler that leaves out improbable tokens draws from another distribution than the one whose log-probabilities are "
       "trained, so the gradient would be biased; sampler.temperature is the same on both sides")
WHY = {"train.group_size": "a group needs at least 2 rollouts: one rollout has no group to be compared with",
       "sampler.top_p": CUT, "sampler.top_k": CUT}


class ConfigError(ValueError):
    pass


def read(file: str | Path | None = None, preset: str | None = None, overrides: list[str] = ()) -> SimpleNamespace:
    """The configuration as a namespace of namespaces (cfg.train.steps). overrides: ["section.key=value", ...].

    [env] also takes the keyword arguments of the environment's class; see `environment_arguments`. `cfg.user_keys` is the
    set of "section.key" that the preset, the file or the command line gave.
    """
    config = _parse(DEFAULTS)
    presets = config.pop("preset", {})
    defaults = {section: dict(table) for section, table in config.items()}
    layers = []
    if file is not None:
        own = _parse(Path(file))
        presets |= own.pop("preset", {})
        layers.append((str(file), own))
    if preset is not None:
        if preset not in presets:
            raise ConfigError(f"--preset {preset}: no such preset{_nearest(preset, presets)}; there are "
                              f"{', '.join(sorted(presets)) or 'none'}")
        layers.append((f"preset {preset}", presets[preset]))
    layers += [("command line", _override(text, defaults)) for text in overrides]
    user_keys = set()
    for source, tables in layers:
        for section, table in tables.items() if isinstance(tables, dict) else [("preset", tables)]:
            if not isinstance(table, dict):
                raise ConfigError(f"{source}: [{section}] must be a table, not {table!r}")
            if section not in defaults:
                raise ConfigError(f"{source}: unknown section [{section}]{_nearest(section, defaults)}; sections are "
                                  f"{', '.join(defaults)}")
            # A file for the default environment may list its defaults: they are not meant for one that is named later.
            ours = source == str(file) and table.get("name") == defaults["env"]["name"]
            for key, value in table.items():
                config[section][key] = _check(source, section, key, value, defaults)
                if not (ours and value == defaults[section].get(key)):
                    user_keys.add(f"{section}.{key}")
    return SimpleNamespace(**{s: SimpleNamespace(**table) for s, table in config.items()}, user_keys=user_keys)


def tables(cfg: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """The resolved configuration as nested dicts, ready for a TOML file."""
    return {section: vars(table) for section, table in vars(cfg).items() if section != "user_keys"}


def environment_arguments(cfg: SimpleNamespace, cls: type) -> dict[str, Any]:
    """The keys of [env] that go to the environment's class, checked against its signature.

    A default meant for another environment is left out; a key that the user gave and the class does not take is an error,
    but for such a default in a copy of config.toml.
    """
    parameters, defaults = inspect.signature(cls).parameters, _parse(DEFAULTS)["env"]
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    arguments = {}
    for key, value in list(vars(cfg.env).items()):
        if key in ENV_KEYS:
            continue
        given = f"env.{key}" in cfg.user_keys
        if (key in parameters and (given or cfg.env.name == defaults["name"])) or (anything and given):
            arguments[key] = _typed("env", key, value, _example(parameters[key])) if key in parameters else value
        elif given and value != defaults.get(key):
            known = [*ENV_KEYS, *parameters]
            raise ConfigError(f"unknown key env.{key}: {cls.__name__} takes no such argument{_nearest(key, known)}; "
                              f"[env] takes {', '.join(known)}")
        else:
            delattr(cfg.env, key)
    missing = [name for name, p in parameters.items() if name not in arguments and p.default is p.empty
               and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing:
        raise ConfigError(f"{cls.__name__} needs env.{missing[0]}: add {missing[0]} = ... under [env]")
    return arguments


def _parse(file: Path) -> dict:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read the configuration {file}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} is not valid TOML: {e}") from None


def _override(text: str, defaults: dict) -> dict:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"cannot read {text!r}: an override is section.key=value, such as train.steps=20")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()      # a bare word is a string: model.name=my/model
    if isinstance(defaults.get(section, {}).get(key), str) and not isinstance(parsed, str):
        parsed = value.strip()      # and so is log.name=2
    return {section: {key: parsed}}


def _check(source: str, section: str, key: str, value: Any, defaults: dict) -> Any:
    name = f"{section}.{key}"
    if key not in defaults[section]:
        if section == "env":        # may belong to the environment's class, which environment_arguments knows
            return value
        raise ConfigError(f"{source}: unknown key {key!r} in section [{section}]"
                          f"{_nearest(key, defaults[section])}; [{section}] takes {', '.join(defaults[section])}")
    value = _typed(f"{source}: {section}", key, value, defaults[section][key])
    allowed, why = ALLOWED.get(name), f" ({WHY[name]})" if name in WHY else ""
    if isinstance(allowed, tuple) and value not in allowed:
        raise ConfigError(f"{source}: {name} = {value!r}{_nearest(str(value), allowed)}; allowed are "
                          f"{', '.join(map(str, allowed))}{why}")
    if isinstance(allowed, list):
        low, high = allowed
        if not math.isfinite(value) or not ((low is None or value >= low) and (high is None or value <= high)):
            bounds = " and ".join([f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None))
            raise ConfigError(f"{source}: {name} = {value!r} is out of range: it must be {bounds}{why}")
    return value


def _typed(where: str, key: str, value: Any, default: Any) -> Any:
    """`value` if it has the type of `default` (an integer may stand for a float); any value where the default has no type."""
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "a table"}
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) in names and type(value) is not type(default):
        raise ConfigError(f"{where}.{key} must be {names[type(default)]}, such as {default!r}, not {value!r}")
    return value


def _example(parameter: inspect.Parameter) -> Any:
    """A value of the type that a constructor's argument has: made from its annotation, or else its default."""
    if parameter.annotation in (str, int, float, bool, list, dict):
        return parameter.annotation()
    return None if parameter.default is parameter.empty else parameter.default


def _nearest(word: str, known) -> str:
    match = difflib.get_close_matches(str(word), [str(k) for k in known], 1)
    return f" (did you mean {match[0]!r}?)" if match else ""
