"""The README's OpenRLHF recipe: the diff applied to the installed file, and OpenRLHF's own code around it.

OpenRLHF imports flash-attn and vLLM, which need CUDA to install, on the way to the code under test, which calls neither. Where
they or others of its imports are missing, empty stand-ins take their places; Experience, merging and advantages are its own.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from recipes import recipe

from corrgrpo import corrgrpo

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("OpenRLHF is not installed: pip install --no-deps openrlhf==0.11.2, and ray", allow_module_level=True)
pytest.importorskip("ray", reason="OpenRLHF needs ray")

FILE = "openrlhf/trainer/ppo_utils/experience_maker.py"
IMPORTED = ["flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed", "vllm", "vllm.inputs",
            "vllm.utils", "deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.ops", "deepspeed.ops.adam",
            "deepspeed.runtime.zero.partition_parameters", "peft", "peft.tuners", "peft.tuners.lora", "torchdata",
            "torchdata.stateful_dataloader", "pylatexenc"]
NAN = float("nan")


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    """experience_maker with the README's diff, as a module."""
    import transformers.integrations.deepspeed
    import transformers.modeling_flash_attention_utils
    import transformers.trainer  # noqa: F401  (looks for what is installed, so before the stand-ins)

    here = Path(importlib.util.find_spec("openrlhf").origin).parents[1]
    folder = tmp_path_factory.mktemp("patched")
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text((here / FILE).read_text())
    done = subprocess.run(["git", "apply", "--unsafe-paths", "-p1", "-"], input=recipe("openrlhf"), cwd=folder, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (folder / FILE).read_text() != (here / FILE).read_text()

    missing = {name.split(".")[0] for name in IMPORTED if importlib.util.find_spec(name.split(".")[0]) is None}
    with pytest.MonkeyPatch.context() as patch:
        for name in IMPORTED:
            if name.split(".")[0] in missing:
                stand_in = ModuleType(name)
                stand_in.__path__ = []
                stand_in.__getattr__ = lambda attribute: MagicMock()
                patch.setitem(sys.modules, name, stand_in)
        spec = importlib.util.spec_from_file_location("openrlhf.trainer.ppo_utils.experience_maker", folder / FILE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def rollouts(parts, per_experience):
    """What OpenRLHF's generator leaves, one Experience a rollout, merged by its own function into experiences."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    experiences = []
    for rows in per_experience:
        each = [Experience(
            sequences=torch.ones(1, 6, dtype=torch.long), attention_mask=torch.ones(1, 6, dtype=torch.long),
            action_mask=torch.tensor([[1] * (1 + i % 4) + [0] * (4 - i % 4)]), kl=torch.zeros(1, 5),
            rewards=parts[i].nan_to_num().sum()[None], index=[i], prompts=["p"], labels=["l"],
            info={"format": parts[i, :1], "accuracy": parts[i, 1:], "reward": parts[i].nan_to_num().sum()[None]}) for i in rows]
        merged = Experience.concat_experiences(each, 0)
        merged.index = list(rows)
        experiences.append(merged)
    return experiences


def advantages(maker, experiences, size):
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=size), reward=SimpleNamespace(clip_range=(-10, 10)),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False)))
    self = object.__new__(maker.RemoteExperienceMaker)
    self.strategy, self.args, self.advantage_estimator = SimpleNamespace(args=args), args, "group_norm"
    self.kl_ctl = SimpleNamespace(value=0.0)
    out = self.compute_advantages_and_returns(experiences)
    return {i: (row, mask) for e in out for i, row, mask in zip(e.index, e.advantages, e.action_mask)}


WEIGHTS = torch.tensor([0.5, 1.0])
ORDER = [[5, 0, 3], [7, 1], [2, 6, 4, 8, 11], [10, 9]]                # micro-batches balanced by length: any order


def test_advantages_are_ours_in_whatever_order_the_experiences_lie(maker):
    parts = torch.rand(12, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0])
    want = corrgrpo(parts, 4, WEIGHTS)
    got = advantages(maker, rollouts(parts, ORDER), 4)
    assert list(maker.REWARDS.values()) == WEIGHTS.tolist() and len(got) == 12
    for i, (row, mask) in got.items():
        assert torch.allclose(row[mask.bool()], want[i].expand(int(mask.sum())), rtol=1e-5), i


def test_a_missing_component_takes_its_rollout_out_and_nobody_else(maker):
    parts = torch.rand(12, 2, generator=torch.Generator().manual_seed(1))
    parts[2, 1] = NAN
    parts[4:8, 0] = NAN                                                # nobody of this group has it
    got = advantages(maker, rollouts(parts, ORDER), 4)
    want = torch.cat([corrgrpo(parts[[0, 1, 3]], 3, WEIGHTS), corrgrpo(parts[4:8, 1:], 4), corrgrpo(parts[8:], 4, WEIGHTS)])
    assert (got[2][0] == 0).all()
    for i, value in zip([0, 1, 3, *range(4, 12)], want):
        row, mask = got[i]
        assert torch.allclose(row[mask.bool()], value.expand(int(mask.sum())), rtol=1e-5), i


def test_a_name_that_the_reward_function_does_not_log_is_an_error(maker):
    experiences = rollouts(torch.rand(4, 2), [range(4)])
    del experiences[0].info["accuracy"]
    with pytest.raises(KeyError, match="accuracy"):
        advantages(maker, experiences, 4)
