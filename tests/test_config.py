import sys

import pytest

import config
import envs
import train


def write(tmp_path, text):
    file = tmp_path / "my.toml"
    file.write_text(text)
    return file


def test_layers_default_file_preset_command_line(tmp_path):
    file = write(tmp_path, "[train]\nsteps = 7\nseed = 3\n[preset.mine.train]\nsteps = 5\ngroup_size = 6")
    cfg = config.read(file, "mine", ["train.seed=4", "model.name=some/model", "train.learning_rate=1",
                                       "log.name=2"])
    assert cfg.log.name == "2"
    assert (cfg.train.steps, cfg.train.seed, cfg.train.group_size, cfg.model.name) == (5, 4, 6, "some/model")
    assert cfg.train.learning_rate == 1.0 and isinstance(cfg.train.learning_rate, float)
    assert cfg.algo.advantage == config.read().algo.advantage
    assert config.read(config.DEFAULTS, "smoke").train.steps == 2


@pytest.mark.parametrize("text, words", [
    ("[train]\nlearning_rat = 1e-6", ["learning_rat", "[train]", "did you mean 'learning_rate'"]),
    ("[trian]\nsteps = 1", ["[trian]", "did you mean 'train'", "algo"]),
    ("[train]\nsteps = 'ten'", ["train.steps", "an integer", "'ten'"]),
    ("[train]\nsteps = true", ["train.steps", "an integer"]),
    ("[train]\nsteps = 1.5", ["train.steps", "an integer"]),
    ("[train]\nsteps = 0", ["train.steps", "at least 1"]),
    ("[train]\ngroup_size = 1", ["train.group_size", "at least 2", "no group to be compared with"]),
    ("[algo]\nadvantage = 'corgrpo'", ["algo.advantage", "did you mean 'corrgrpo'", "dr_grpo"]),
    ("[train\nsteps = 1", ["not valid TOML"]),
    ("[env]\ntimeuot = 3", ["env.timeuot", "did you mean 'timeout'"]),
    ("[env]\nreward_weights = {pas = 1.0}", ["'pas'", "efficiency"]),
    ("[env]\nreward_weights = {pass = 'much'}", ["reward_weights", "'much'"]),
    ("[env]\nname = 'leetcod'", ["leetcod", "my_package.my_module:MyEnv"]),
    ("[env]\nname = 'no.such.module:Env'", ["no.such.module", "No module"]),
    ("[env]\ndata = 'missing.jsonl'", ["env.data", "missing.jsonl", "CORRGRPO_DATA"]),
    ("[model]\nname = 'no/such-model'", ["model.name", "no/such-model"]),
    ("[sampler]\ntop_p = 0.9", ["sampler.top_p = 0.9", "1.0", "gradient would be biased"]),
    ("[sampler]\ntop_k = 50", ["sampler.top_k = 50", "0", "gradient would be biased"]),
    ("[env]\ntimeout = 'long'", ["env.timeout", "a number"]),
])
def test_a_mistake_gets_one_clear_message(tmp_path, capsys, monkeypatch, text, words):
    """Exit code 2, no traceback, before any model is loaded."""
    monkeypatch.setattr(train.policy, "load", lambda *a: pytest.fail("a model was loaded"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert train.main(["--config", str(write(tmp_path, text)), f"log.dir={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("arguments, words", [
    (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
    (["--preset", "smok"], ["smok", "did you mean 'smoke'"]),
    (["train.steps"], ["section.key=value"]),
    (["--resume"], ["log.name"]),
    (["--resume", "log.name=never"], ["never", "no run folder"]),
])
def test_a_wrong_command_line_gets_one_clear_message(tmp_path, capsys, arguments, words):
    assert train.main([*arguments, f"log.dir={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message, message


def test_a_run_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    assert train.main([f"log.dir={tmp_path}", "log.name=old"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("line, words", [
    ('{"task_id": "a"', ["line 2", "unreadable"]),
    ('{"task_id": "b", "prompt": ""}', ["row 2", "'completion'", "entry_point"]),
    ("[1, 2]", ["row 2", "an object"]),
])
def test_an_unreadable_row_names_file_and_line(tmp_path, capsys, line, words):
    good = '{"task_id": "a", "prompt": "", "completion": "", "entry_point": "f", "test": "", "query": "q"}'
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    assert train.main([f"env.data={tmp_path}/rows.jsonl", f"log.dir={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    for word in ["rows.jsonl", *words]:
        assert word in message, message


def test_a_users_environment_needs_no_edit(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(
        "class MyEnv:\n    reward_names, reward_weights = ('a',), (1.0,)\n"
        "    def __init__(self, level: int, hint: str = 'no'):\n        self.level, self.hint = level, hint\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_env", None)
    cls = envs.find("my_env:MyEnv")
    cfg = config.read(None, None, ["env.name=my_env:MyEnv", "env.level=3"])
    assert vars(cls(**config.environment_arguments(cfg, cls))) == {"level": 3, "hint": "no"}
    with pytest.raises(config.ConfigError, match=r"needs env\.level"):
        config.environment_arguments(config.read(None, None, []), cls)
    with pytest.raises(config.ConfigError, match="did you mean 'level'"):
        config.environment_arguments(config.read(None, None, ["env.level=1", "env.levle=2"]), cls)
    with pytest.raises(config.ConfigError, match=r"env\.level must be an integer"):
        config.environment_arguments(config.read(None, None, ["env.level='x'"]), cls)


def test_what_is_given_counts_even_where_it_is_the_default_of_another_environment(tmp_path):
    cls = envs.find("envs.mbpp:MBPP")                           # its own timeout is 10, LeetCode's 5

    def arguments(file=None, *overrides):
        return config.environment_arguments(config.read(file, None, list(overrides)), cls)

    other = "env.name=envs.mbpp:MBPP"
    assert arguments(None, other) == arguments(config.DEFAULTS, other) == {}
    assert arguments(None, other, "env.timeout=5") == {"timeout": 5.0}
    assert arguments(write(tmp_path, "[env]\nname = 'envs.mbpp:MBPP'\ntimeout = 5.0\nsandbox = 'auto'")) == {"timeout": 5.0}
    assert arguments(write(tmp_path, "[env]\ntimeout = 5.0"), other) == {"timeout": 5.0}


def test_every_preset_reads():
    for name in config._parse(config.DEFAULTS)["preset"]:
        assert config.read(None, name).user_keys
    assert config.read(None, "leetcode_qwen25_coder_7b").model.name == "Qwen/Qwen2.5-Coder-7B-Instruct"


def test_help_shows_every_key(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for section, table in config.tables(config.read()).items():
        assert f"[{section}]" in text and all(key in text for key in table)


def test_every_key_has_a_comment_and_numbers_have_bounds():
    for line in config.DEFAULTS.read_text().split("[preset")[0].splitlines():
        if "=" in line and not line.startswith("#"):
            assert "#" in line, line
    for section, table in config.tables(config.read()).items():
        for key, value in table.items():
            if type(value) in (int, float):
                assert f"{section}.{key}" in config.ALLOWED
