"""The update's arithmetic, and whole runs of `python train.py` on a tiny model: repeatable, resumable, hard to break."""

import collections
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import config
import envs
import train
from envs import Score, Task
from rollout import Rollout

ROOT = Path(__file__).parent.parent
VARIES = ("time/", "tokens_per_second", "memory/")          # metrics that may differ between two equal runs


# ---- the loss ------------------------------------------------------------------------------------------------------------

ALGO = SimpleNamespace(clip_low=0.2, clip_high=0.3, importance_cap=2.0)


def test_k3_is_positive_zero_at_equality_and_pulls_towards_the_reference():
    log_p = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -2.0])
    kl = train.kl_k3(log_p, reference)
    assert kl[0] == 0 and (kl[1:] > 0).all()
    kl.sum().backward()
    assert log_p.grad[0] == 0 and log_p.grad[1] < 0 < log_p.grad[2]     # descent raises a low log-probability, lowers a high
    assert torch.isfinite(train.kl_k3(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]))).all()


def test_clipping_bites_on_the_side_that_the_advantage_pushes_to():
    old = torch.zeros(4)
    log_p = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    loss, stats = train.token_loss(log_p, old, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), ALGO)
    assert torch.allclose(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8]))
    assert stats["clip_fraction"] == 2
    loss.sum().backward()
    assert (log_p.grad != 0).tolist() == [False, True, True, False]


def test_the_importance_weight_is_truncated_and_carries_no_gradient():
    log_p = torch.zeros(3, requires_grad=True)
    sampled = torch.tensor([0.0, -3.0, 3.0])
    loss, stats = train.token_loss(log_p, log_p.detach(), sampled, torch.ones(3), ALGO)
    assert torch.allclose(-loss, torch.tensor([1.0, 2.0, math.exp(-3)])) and stats["importance/truncated"] == 1
    loss.sum().backward()
    assert torch.allclose(-log_p.grad, torch.tensor([1.0, 2.0, math.exp(-3)]))
    off = SimpleNamespace(**{**vars(ALGO), "importance_cap": 0.0})
    assert torch.equal(train.token_loss(log_p, log_p.detach(), sampled, torch.ones(3), off)[0], -torch.ones(3))


# ---- the update ----------------------------------------------------------------------------------------------------------


class Recorder(torch.optim.SGD):
    """Keeps each update's gradient and moves nothing."""

    def step(self):
        self.seen = [*getattr(self, "seen", []), torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])]


def settings(*overrides):
    cfg = config.read(None, None, ["train.max_grad_norm=0", "model.dtype=float32", "sampler.max_logprob_diff=100", *overrides])
    return cfg


def rollouts_of(groups, lengths=range(1, 9), live=True):
    """Groups of rollouts of different lengths with made-up advantages and sampler log-probabilities."""
    g = torch.Generator().manual_seed(0)
    out = []
    for group in range(groups):
        prompt = torch.randint(3, 49000, (3 + group,), generator=g).tolist()
        for n in lengths:
            out.append(Rollout(Task("t", []), group, prompt, torch.randint(3, 49000, (n,), generator=g).tolist(), [True] * n,
                               [-10.0] * n, advantage=torch.randn(1, generator=g).item(), live=live))
    return out


def gradient(model, rollouts, *overrides, reference=None):
    optimizer = Recorder(model.parameters(), lr=0.0)
    state = {"skipped": 0, "skipped_in_a_row": 0}
    metrics = train.update(model, reference, optimizer, rollouts, state, settings(*overrides))
    return getattr(optimizer, "seen", []), metrics


def same(a, b, tolerance=1e-5):
    return torch.allclose(a, b, rtol=1e-3, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_gradients_do_not_depend_on_the_micro_batch(tiny, tiny_folder, aggregation, kl):
    reference = train.policy.load(str(tiny_folder))[0] if kl else None
    if kl:
        with torch.no_grad():
            reference.get_input_embeddings().weight.mul_(0.9)
    rollouts = rollouts_of(2)
    results = [gradient(tiny, rollouts, f"train.micro_batch_size={size}", f"algo.aggregation={aggregation}", f"algo.kl={kl}",
                        f"model.share_prompt={share}", reference=reference)
               for size, share in ((1, "true"), (2, "true"), (4, "true"), (8, "true"), (8, "false"))]
    for (g,), metrics in results[1:]:
        assert same(g, results[0][0][0])
        assert math.isclose(metrics["loss"], results[0][1]["loss"], rel_tol=1e-4, abs_tol=1e-7)
        assert metrics["update/tokens"] == 72


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_gradient_is_the_formulas(tiny, aggregation):
    """With one update the ratio is 1: the gradient is -w A grad log p, averaged over tokens, or over each rollout first."""
    rollouts = rollouts_of(1, lengths=(2, 5))
    (got,), _ = gradient(tiny, rollouts, f"algo.aggregation={aggregation}", "algo.importance_cap=0.0")
    tiny.zero_grad()
    a, b = (-r.advantage * train.policy.log_probs(tiny, r.prompt, [r.ids]) for r in rollouts)
    (torch.cat([a, b]).mean() if aggregation == "token" else (a.mean() + b.mean()) / 2).backward()
    assert same(got, torch.cat([p.grad.flatten() for p in tiny.parameters()]))


def test_dead_groups_dilute_nothing_unless_asked_for(tiny):
    live, dead = rollouts_of(1), rollouts_of(2, live=False)[8:]
    for r in dead:
        r.advantage = 0.0
    (alone,), _ = gradient(tiny, live)
    (both,), metrics = gradient(tiny, live + dead)
    assert torch.equal(alone, both) and metrics["update/tokens"] == 36
    (diluted,), metrics = gradient(tiny, live + dead, "algo.train_dead_groups=true")
    assert same(2 * diluted, alone) and metrics["update/tokens"] == 72
    assert gradient(tiny, dead)[0] == []


def test_kl_moves_dead_groups_only_when_asked_for(tiny, tiny_folder):
    reference = train.policy.load(str(tiny_folder))[0]
    with torch.no_grad():
        reference.get_input_embeddings().weight.mul_(0.9)
    dead = rollouts_of(1, live=False)
    for r in dead:
        r.advantage = 0.0
    assert gradient(tiny, dead, "algo.kl=0.1", reference=reference)[0] == []
    (g,), metrics = gradient(tiny, dead, "algo.kl=0.1", "algo.train_dead_groups=true", reference=reference)
    assert g.abs().max() > 0 and metrics["kl"] > 0


def test_rollouts_without_a_score_and_the_environments_tokens_are_not_trained_on(tiny):
    rollouts = rollouts_of(1, lengths=(4, 4, 4))
    (want,), _ = gradient(tiny, rollouts[:2])
    rollouts[2].error = "no score"
    assert torch.equal(gradient(tiny, rollouts)[0][0], want)
    masked = rollouts_of(1, lengths=(4,))
    masked[0].trained = [True, False, False, True]
    masked[0].log_probs = [-10.0, 0.0, 0.0, -10.0]
    (got,), metrics = gradient(tiny, masked, "algo.importance_cap=0.0")
    assert metrics["update/tokens"] == 2
    tiny.zero_grad()
    log_p = train.policy.log_probs(tiny, masked[0].prompt, [masked[0].ids])
    (-masked[0].advantage * (log_p[0] + log_p[3]) / 2).backward()
    assert same(got, torch.cat([p.grad.flatten() for p in tiny.parameters()]))


def test_truncated_replies_can_be_left_out_and_all_truncated_is_no_update(tiny):
    rollouts = rollouts_of(1)
    for r in rollouts[1:]:
        r.finish_reason = "length"
    (g,), metrics = gradient(tiny, rollouts, "algo.mask_truncated=true")
    assert torch.equal(g, gradient(tiny, rollouts[:1])[0][0]) and metrics["update/tokens"] == 1
    rollouts[0].finish_reason = "length"
    seen, metrics = gradient(tiny, rollouts, "algo.mask_truncated=true")
    assert seen == [] and metrics["loss"] == 0.0


def test_several_updates_share_the_groups_and_keep_the_old_policy(tiny):
    rollouts = rollouts_of(4)
    seen, metrics = gradient(tiny, rollouts, "train.updates_per_step=2")
    assert len(seen) == 2 and metrics["update/tokens"] == 144
    assert same(seen[1], gradient(tiny, rollouts[16:])[0][0])
    optimizer = torch.optim.SGD(tiny.parameters(), lr=5.0)
    metrics = train.update(tiny, None, optimizer, rollouts, {"skipped": 0, "skipped_in_a_row": 0},
                           settings("train.updates_per_step=2", "train.max_grad_norm=1.0"))
    assert metrics["clip_fraction"] > 0                     # the second update sees a policy that has moved


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_ends_the_run(tiny):
    rollouts = rollouts_of(1)
    rollouts[3].advantage = math.nan
    before = [p.clone() for p in tiny.parameters()]
    optimizer = torch.optim.AdamW(tiny.parameters(), lr=0.1)
    state = {"skipped": 0, "skipped_in_a_row": 0}
    cfg = settings("train.max_skipped=2")
    metrics = train.update(tiny, None, optimizer, rollouts, state, cfg)
    assert metrics["update/skipped"] == 1 and "grad_norm" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))
    with pytest.raises(train.RunError, match="2 updates in a row"):
        train.update(tiny, None, optimizer, rollouts, state, cfg)
    train.update(tiny, None, optimizer, rollouts_of(1), state, cfg)
    assert state == {"skipped": 2, "skipped_in_a_row": 0}


def test_a_sampler_with_other_weights_stops_the_run_before_the_update(tiny):
    before = [p.clone() for p in tiny.parameters()]
    with pytest.raises(train.RunError, match="sampler and trainer disagree"):
        train.update(tiny, None, torch.optim.AdamW(tiny.parameters(), lr=0.1), rollouts_of(1),
                     {"skipped": 0, "skipped_in_a_row": 0}, config.read(None, None, ["model.dtype=float32"]))
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))


# ---- advantages and their metrics ----------------------------------------------------------------------------------------


def scored(rows, size, names=("a", "b")):
    return [Rollout(Task("t", []), i // size, [1], [5], [True], [-1.0],
                    score=None if row is None else Score(dict(zip(names, row))), error="lost" if row is None else None)
            for i, row in enumerate(rows)]


def test_metrics_of_rewards_and_correlations():
    rollouts = scored([(0, 0), (1, 2), (0, 1), (1, 3), (5, 1), (5, 2), (5, 3), (5, 4), (1, 1), (1, 1), (1, 1), (1, 1)], 4)
    m = train.advantages(rollouts, {"a": 1.0, "b": 0.5}, settings())
    assert m["reward/a"] == 26 / 12 and m["reward/b"] == 20 / 12 and math.isclose(m["reward/total"], 26 / 12 + 10 / 12)
    assert math.isclose(m["groups/live"], 2 / 3) and math.isclose(m["groups/constant/a"], 2 / 3)
    assert math.isclose(m["correlation/a/b"], 4 / math.sqrt(20))          # only the first group has both alive
    assert math.isclose(m["reward_std/b"], (2 * math.sqrt(5 / 3) + 0) / 3)
    assert math.isclose(m["denominator/corrgrpo"], (math.sqrt(2 + 2 * 4 / math.sqrt(20)) + 1) / 2)
    assert [r.live for r in rollouts] == [True] * 8 + [False] * 4 and all(r.advantage == 0 for r in rollouts[8:])


def test_no_score_is_left_out_of_its_group_and_named_in_no_metric():
    rollouts = scored([(0, 0), None, (1, 2), (1, 1), None, None, None, (1, 1)], 4)
    m = train.advantages(rollouts, {"a": 1.0, "b": 1.0}, settings())
    assert m["rollouts/errors"] == 4 and math.isclose(m["reward/a"], 3 / 4)
    three = train.corrgrpo.corrgrpo(torch.tensor([[0.0, 0], [1, 2], [1, 1]], dtype=torch.float64), 3)
    assert [rollouts[i].advantage for i in (0, 2, 3)] == three.tolist()
    assert rollouts[7].advantage == 0 and not rollouts[7].live           # one is left of its group
    assert not any(math.isnan(value) for value in m.values())
    with pytest.raises(train.RunError, match=r"env\.max_errors = 0\.4.*lost"):
        train.advantages(rollouts, {"a": 1.0, "b": 1.0}, settings("env.max_errors=0.4"))


def test_a_pair_that_never_varies_together_has_no_key():
    m = train.advantages(scored([(0, 1), (1, 1)], 2), {"a": 1.0, "b": 1.0}, settings())
    assert "correlation/a/b" not in m and m["denominator/corrgrpo"] == pytest.approx(1.0)
    assert "denominator/grpo" not in train.advantages(scored([(1, 1), (1, 1)], 2), {"a": 1.0, "b": 1.0}, settings())


def test_a_group_that_cancels_shrinks_as_a_whole():
    rollouts = scored([(1, 0), (0, 1), (0, 1), (0, 1)], 4)
    bare = ("algo.max_multiplier=0", "algo.advantage_clip=0")
    for setting, largest in (("algo.advantage_clip=0.3", 0.3), ("algo.max_multiplier=2.0", 2 * 0.075)):
        m = train.advantages(rollouts, {"a": 1.0, "b": 0.9}, settings(*bare, setting))
        assert m["advantage/clipped"] == 4
        assert [r.advantage for r in rollouts] == pytest.approx([largest, -largest / 3, -largest / 3, -largest / 3], rel=1e-3)
        assert m["advantage/abs_mean"] == pytest.approx(largest / 2, rel=1e-3)
    m = train.advantages(rollouts, {"a": 1.0, "b": 0.9}, settings(*bare))
    assert m["advantage/clipped"] == 0 and rollouts[0].advantage == pytest.approx(75, rel=1e-3)
    for scale in (1.0, 100.0):      # a multiplier: it does not depend on the rewards' scale, and touches no other estimator
        rows = [(0, 1), (1, 0), (1, 1), (0, 0)]
        m = train.advantages(scored(rows, 4), {"a": scale, "b": scale}, settings("algo.advantage_clip=0"))
        assert m["advantage/clipped"] == 0
    m = train.advantages(scored([(0, 1), (1, 0)] * 2, 4), {"a": 1.0, "b": 0.9}, settings("algo.advantage=grpo"))
    assert m["advantage/clipped"] == 0


def test_expected_dead_groups_of_a_rare_binary_reward():
    """Pass rate 1/8 and groups of two: (1/8)^2 + (7/8)^2 of the groups have no signal."""
    m = train.advantages(scored([(1,), *[(0,)] * 7], 2, ("a",)), {"a": 1.0}, settings("train.group_size=2"))
    assert m["groups/dead_expected"] == pytest.approx(50 / 64)


def test_tasks_are_drawn_in_whole_epochs():
    drawn = [i for cursor in range(0, 30, 3) for i in train.draw(5, cursor, 3, seed=7)]
    assert all(sorted(drawn[i : i + 5]) == list(range(5)) for i in range(0, 30, 5))
    assert drawn == train.draw(5, 0, 30, seed=7) != train.draw(5, 0, 30, seed=8)


# ---- whole runs ----------------------------------------------------------------------------------------------------------


def arguments(folder, model, *more):
    return [f"log.dir={folder}", f"model.name={model}", "env.name=tests.toy:Toy", "train.steps=4", "train.prompts_per_step=2",
            "train.group_size=4", "train.save_every=2", "sampler.max_new_tokens=12", "train.learning_rate=1e-2",
            "train.threads=1", *more]


def metrics_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VARIES)} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("runs")
    assert train.main(arguments(folder, tiny_folder, "log.name=whole")) == 0
    return folder / "whole"


def test_a_run_leaves_what_it_promises(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in ("reward/total", "reward/vowels", "reward_std/length", "correlation/vowels/length", "denominator/grpo",
                "denominator/corrgrpo", "advantage/abs_mean", "advantage/clipped", "groups/live", "rollouts/errors",
                "response/length", "response/truncated", "loss", "clip_fraction", "grad_norm", "lr", "logprob_diff/mean",
                "logprob_diff/max", "sync_diff/mean", "sync_diff/max", "time/sample", "time/score", "time/update", "time/sync",
                "tokens_per_second", "memory/peak_gb"):
        assert all(isinstance(row[key], int | float) for row in rows), key
    assert [json.loads(line)["step"] for line in (finished / "eval.jsonl").read_text().splitlines()] == [0, 4]
    rollouts = [json.loads(line) for line in (finished / "rollouts" / "step-000003.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8 and set(rollouts[0]["rewards"]) == {"vowels", "length"}
    assert [f.name for f in (finished / "checkpoints").iterdir()] == ["step-000004"]
    assert (finished / "plots" / "dynamics.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())
    model, _ = train.policy.load(str(finished / "model"))
    saved, _ = train.policy.load(str(finished / "checkpoints" / "step-000004"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters()))
    assert config.tables(config.read(finished / "config.toml"))["train"]["steps"] == 4


def test_the_learning_rate_warms_up_and_falls(finished, tiny_folder, tmp_path):
    assert [row["lr"] for row in metrics_of(finished)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    more = ["log.name=falls", "train.warmup_steps=2", "train.learning_rate_decay=1.0"]
    assert train.main(arguments(tmp_path, tiny_folder, *more)) == 0
    assert [row["lr"] for row in metrics_of(tmp_path / "falls")] == pytest.approx([0.005, 0.0075, 0.005, 0.0025])


def test_the_same_seed_gives_the_same_run_and_another_seed_another(finished, tiny_folder, tmp_path):
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=again")) == 0
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=other", "train.seed=1")) == 0
    assert metrics_of(tmp_path / "again") == metrics_of(finished) != metrics_of(tmp_path / "other")


def test_killed_at_any_moment_and_resumed_yields_the_same_numbers(finished, tiny_folder, tmp_path):
    """SIGKILL before the first checkpoint, at it, and some time after it; then to the end, bit for bit."""
    run, command = tmp_path / "killed", [sys.executable, "train.py", *arguments(tmp_path, tiny_folder, "log.name=killed")]
    killed = 0
    for awaited, delay in (("metrics.jsonl", 0.0), ("checkpoints/step-??????", 0.0), ("checkpoints/step-??????", 0.4)):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 120
        while not list(run.glob(awaited)) and time.time() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        command = [*command, "--resume"] if "--resume" not in command else command
    assert killed >= 2 and list(run.glob("checkpoints/step-??????"))
    (run / "checkpoints" / "step-000009.part77").mkdir()        # as if one kill had come in the middle of a save
    assert train.main([*arguments(tmp_path, tiny_folder, "log.name=killed"), "--resume"]) == 0
    assert metrics_of(run) == metrics_of(finished)
    for same in ("eval.jsonl", *(f"rollouts/step-00000{step}.jsonl" for step in range(1, 5))):
        assert (run / same).read_text() == (finished / same).read_text()
    assert [f.name for f in (run / "checkpoints").iterdir()] == ["step-000004"]
    ours, theirs = (train.policy.load(str(folder / "model"))[0] for folder in (run, finished))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def test_stopped_in_an_evaluation_it_has_the_step_and_evaluates_on_resume(finished, tiny_folder, tmp_path, monkeypatch):
    evaluate = train.evaluate

    def stopped(*args):
        if args[-1]:
            raise KeyboardInterrupt
        evaluate(*args)

    run, command = tmp_path / "stopped", arguments(tmp_path, tiny_folder, "log.name=stopped")
    with monkeypatch.context() as patched:
        patched.setattr(train, "evaluate", stopped)
        assert train.main(command) == 130
    with monkeypatch.context() as patched:                      # no step is taken again
        patched.setattr(train, "update", lambda *args: pytest.fail("a step was taken again"))
        assert train.main([*command, "--resume"]) == 0
    assert (run / "eval.jsonl").read_text() == (finished / "eval.jsonl").read_text()
    assert metrics_of(run) == metrics_of(finished) and (run / "model").is_dir()


def test_a_run_stopped_before_its_first_step_can_be_resumed_or_begun_anew(tiny_folder, tmp_path, monkeypatch):
    command = arguments(tmp_path, tiny_folder, "log.name=early", "eval.split=", "train.steps=1")
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(train.policy, "load", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            assert train.main(command) == 130
    assert train.main(["--resume", f"log.dir={tmp_path}", "log.name=early"]) == 0           # as configured, to the last key
    assert len(metrics_of(tmp_path / "early")) == 1 and train.main(command) == 2


def test_a_warm_start_learns_the_references_and_resumes_bit_for_bit(tiny_folder, tmp_path):
    """Killed in the middle of the supervised steps, then again when they are over: the numbers of an unbroken run."""
    more = ["train.warm_start_steps=6", "train.warm_start_rows=3", "train.warm_start_learning_rate=3e-2", "algo.kl=0.1",
            "train.steps=2"]
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=whole", *more)) == 0
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows = [json.loads(line) for line in (whole / "warm_start.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert metrics_of(whole)[0]["kl"] < 1e-3                    # the reference is the policy that RL starts from

    save, saved = train.policy.save, []

    def killed_after(count):
        def save_then_die(*args, **kwargs):
            save(*args, **kwargs)
            saved.append(args[2].name)
            if len(saved) == count:
                raise KeyboardInterrupt
        return save_then_die

    for count, resume in ((1, []), (3, ["--resume"])):          # after supervised step 2, and when the last is saved
        train.policy.save = killed_after(count)
        assert train.main([*arguments(tmp_path, tiny_folder, "log.name=broken", *more), *resume]) == 130
        train.policy.save = save
    assert saved == ["warm_start"] * 3
    assert train.main([*arguments(tmp_path, tiny_folder, "log.name=broken", *more), "--resume"]) == 0
    assert metrics_of(broken) == metrics_of(whole)
    again = [json.loads(line) for line in (broken / "warm_start.jsonl").read_text().splitlines()]
    assert [row | {"time": 0} for row in again] == [row | {"time": 0} for row in rows]


def test_a_finished_run_can_be_made_longer(finished, tiny_folder, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "longer")
    assert train.main(["--resume", f"log.dir={tmp_path}", "log.name=longer", "train.steps=5", "train.weight_decay=0.1",
                       "train.beta1=0.8"]) == 0                                             # the rest is its own
    group, = torch.load(tmp_path / "longer" / "checkpoints" / "step-000005" / "trainer.pt")["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0.1 and group["betas"][0] == 0.8
    assert metrics_of(tmp_path / "longer")[:4] == metrics_of(finished)
    assert len(metrics_of(tmp_path / "longer")) == 5
    assert [f.name for f in (tmp_path / "longer" / "checkpoints").iterdir()] == ["step-000005"]
    model, saved = (train.policy.load(str(tmp_path / "longer" / name))[0] for name in ("model", "checkpoints/step-000005"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters()))


def test_a_scorer_that_fails_on_some_rollouts_ends_nothing(tiny_folder, tmp_path, capsys):
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=some", "env.wrong='-1'", "train.steps=3")) == 0
    assert collections.Counter(row["rollouts/errors"] for row in metrics_of(tmp_path / "some"))[4] >= 1
    assert "have no score and are left out" in capsys.readouterr().out
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=all", "env.wrong='-1'", "env.max_errors=0.1")) == 1
    assert "env.max_errors" in capsys.readouterr().err


def test_prompts_over_the_limit_are_skipped_and_counted(tiny_folder, tmp_path, capsys):
    assert train.main(arguments(tmp_path, tiny_folder, "log.name=long", "sampler.max_prompt_tokens=5")) == 1
    message = capsys.readouterr()
    assert "5 of 5 training prompts are longer than 5 tokens (sampler.max_prompt_tokens" in message.out
    assert "no training prompt" in message.err


@pytest.mark.timeout(900)
def test_the_embedded_model_trains_on_the_starter_problems_by_one_command(tmp_path):
    """The README's command with the smoke preset, in a process of its own."""
    done = subprocess.run([sys.executable, "train.py", "--config", "config.toml", "--preset", "smoke", f"log.dir={tmp_path}",
                           "log.name=smoke"], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"CI": "1"})
    assert done.returncode == 0, done.stderr
    assert "held-out tasks, greedy" in done.stdout and "step 2/2 | reward" in done.stdout
    rows = metrics_of(tmp_path / "smoke")
    for name in envs.find("leetcode").reward_names:
        assert all(0 <= row[f"reward/{name}"] <= 1 for row in rows)
    assert all(row["logprob_diff/mean"] < 0.1 and row["rollouts/errors"] == 0 for row in rows)
