"""The README's TRL recipe in TRL itself: its GRPOTrainer, its reward functions, its gathering over processes."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'trl>=1.16,<1.17'")

from datasets import Dataset
from recipes import run
from trl import GRPOConfig

from corrgrpo import corrgrpo

NAN = float("nan")


def config(folder, **keys):
    return GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
                      disable_tqdm=True, learning_rate=1e-5, **keys)


def watched(base):
    """The recipe's trainer, which also keeps what went in and came out."""
    class Watched(base):
        seen = None

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            new = self._rewards.clone(), output["advantages"].clone(), list(self._logs["advantages"])
            self.seen = [*(self.seen or []), new]
            return output
    return Watched


def expected(rewards, size, weights):
    """Group by group, with what has no score taken out by hand."""
    out = torch.zeros(len(rewards))
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        columns = ~group.isnan().all(0)
        rows = ~group[:, columns].isnan().any(1)
        if columns.any() and rows.any():
            part = corrgrpo(group[rows][:, columns], int(rows.sum()), torch.tensor(weights)[columns])
            out[start : start + size][rows] = part
    return out


def test_two_training_steps_of_the_embedded_model(embedded, tmp_path):
    model, tokenizer = copy.deepcopy(embedded[0]), embedded[1]
    calls = []

    def vowels(completions, **kwargs):
        return [100.0 * sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]

    def short(completions, **kwargs):                                # TRL's None: one completion of the first group timed out
        calls.append(len(completions))
        return [None if i == 1 else -float(len(text)) for i, text in enumerate(completions)]

    async def asked(prompts, completions, **kwargs):                 # a reward for some prompts only, from an async function
        return [float(len(set(text))) if "colour" in prompt else None for prompt, text in zip(prompts, completions)]

    weights = [1.0, 0.5, 2.0]
    trainer = watched(run("trl")["CorrGRPOTrainer"])(
        model, reward_funcs=[vowels, short, asked], processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["Name a colour.", "Name a river.", "Name a colour, please.", "Say no."]}),
        args=config(tmp_path, max_steps=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
                    reward_weights=weights, gradient_checkpointing=False))
    before = next(model.parameters()).detach().clone()
    result = trainer.train()
    assert calls == [8, 8] and len(trainer.seen) == 2 and result.global_step == 2
    for rewards, advantages, logged in trainer.seen:
        assert rewards.shape == (8, 3) and rewards[1, 1].isnan() and not rewards[2:, 1].isnan().any()
        assert torch.allclose(advantages, expected(rewards, 4, weights), rtol=1e-5, atol=1e-7)
        assert advantages[1] == 0 and advantages.isfinite().all() and advantages.abs().max() > 0
        assert logged == advantages.tolist()
    assert not torch.equal(before, next(model.parameters())) and all(p.isfinite().all() for p in model.parameters())
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(logs) == 2
    for row, (rewards, _, _) in zip(logs, trainer.seen):
        assert row["rewards/missing"] == pytest.approx(rewards.isnan().float().mean().item())


def test_groups_that_lie_on_two_processes_are_gathered_in_order(tmp_path):
    """Two processes on CPU, a group on both; each finds its own rollouts' advantages by their prompts, not their places."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here = Path(__file__).parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
                           str(here / "trl_process.py"), str(tmp_path)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("advantages agree") == 2
