"""The README's verl recipe in verl itself: its registry, its advantage functions, its v1 trainer and transfer queue."""

import os
import shlex
import subprocess
import sys
import uuid
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install --no-deps verl==0.9.1, and what it imports")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl import DataProto
    from verl.trainer.ppo import core_algos, ray_trainer

import recipes
from hydra import compose, initialize_config_module

from corrgrpo import corrgrpo

WEIGHTS = torch.tensor([0.5, 1.0])


@pytest.fixture
def recipe():
    """The recipe's names; what it registers is taken back afterwards."""
    from verl.trainer.ppo.v1 import trainer_base

    registries = core_algos.ADV_ESTIMATOR_REGISTRY, trainer_base.TRAINER_REGISTRY
    before = [dict(registry) for registry in registries]
    yield recipes.run("verl")
    for registry, old in zip(registries, before):
        registry.clear()
        registry.update(old)


def config(*more):
    """verl's own configuration with the overrides of the README's command line."""
    words = shlex.split(recipes.recipe("verl command").replace("\\\n", " "))
    overrides = words[words.index("verl.trainer.main_ppo") + 1 :]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides, *more])


def batch(seed=0, groups=3, size=4, length=5):
    """What verl has: rewards on the last token, object arrays of uids in any order, masks of unequal length."""
    g = torch.Generator().manual_seed(seed)
    n = groups * size
    uids = np.array([str(uuid.uuid4()) for _ in range(groups)], dtype=object).repeat(size)
    uids = uids[torch.randperm(n, generator=g).numpy()]
    parts = torch.rand(n, 2, generator=g, dtype=torch.float64) * torch.tensor([1.0, 30.0])
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    mask = (torch.arange(length) < lengths[:, None]).long()
    rewards = torch.zeros(n, length).scatter_(1, lengths[:, None] - 1, (parts @ WEIGHTS.double())[:, None].float())
    return uids, parts, mask, rewards


def as_data(uids, parts, mask, rewards):
    return DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask, "prompts": torch.zeros(len(uids), 2, dtype=torch.long),
                 "attention_mask": torch.cat([torch.ones(len(uids), 2, dtype=torch.long), mask], 1)},
        non_tensors={"uid": uids, "format": np.array(parts[:, 0].tolist(), dtype=object),
                     "accuracy": np.array(parts[:, 1].tolist(), dtype=object)})


def test_verls_own_call_of_the_gdpo_slot_gives_our_advantages(recipe):
    uids, parts, mask, rewards = batch()
    data = ray_trainer.compute_advantage(as_data(uids, parts, mask, rewards), adv_estimator="gdpo", config=config().algorithm)
    ids = torch.tensor([list(dict.fromkeys(uids)).index(uid) for uid in uids])
    want = corrgrpo(parts, ids, WEIGHTS)[:, None] * mask
    assert data.batch["advantages"].dtype == rewards.dtype and data.batch["advantages"].shape == mask.shape
    assert torch.allclose(data.batch["advantages"], want.float())
    assert torch.equal(data.batch["advantages"], data.batch["returns"])
    other = ray_trainer.compute_advantage(as_data(*batch(1)), adv_estimator="grpo", config=config().algorithm)
    assert not torch.allclose(other.batch["advantages"], want.float())


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_component_takes_its_rollout_out_and_nobody_else(recipe, missing):
    uids, parts, mask, rewards = batch()
    data = as_data(uids, parts, mask, rewards)
    data.non_tensor_batch["accuracy"][5] = missing
    data.non_tensor_batch["format"][uids == uids[0]] = missing                      # nobody of this group has it
    got = ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=config().algorithm).batch["advantages"]
    assert got.isfinite().all() and (got[5] == 0).all()
    for uid in dict.fromkeys(uids):
        rows = [i for i, u in enumerate(uids) if u == uid and i != 5]
        columns = [1] if uid == uids[0] else [0, 1]
        want = corrgrpo(parts[rows][:, columns], len(rows), WEIGHTS[columns])
        assert torch.allclose(got[rows], (want[:, None] * mask[rows]).float())


def test_a_key_that_compute_score_does_not_return_is_an_error(recipe):
    with pytest.raises(KeyError, match="speed"):
        ray_trainer.compute_advantage(as_data(*batch()), adv_estimator="gdpo",
                                      config=config("algorithm.gdpo_reward_keys=[format,speed]").algorithm)


def test_the_v1_trainer_fetches_the_components_through_the_transfer_queue(tmp_path):
    """In a process of its own, since the queue lives in Ray; the module comes in as the README's command line brings it in."""
    here = Path(__file__).parent
    (tmp_path / "corrgrpo_verl.py").write_text(recipes.recipe("verl"))
    path = os.pathsep.join(map(str, (tmp_path, here, here.parents[1])))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    for line in recipes.recipe("verl command").splitlines():
        if line.startswith("export "):
            env.update([line.removeprefix("export ").split("=", 1)])
    done = subprocess.run([sys.executable, "-W", "ignore", str(here / "verl_process.py")], env=env, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "advantages agree" in done.stdout
