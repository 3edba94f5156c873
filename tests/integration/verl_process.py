"""Started by test_verl.py: verl's v1 trainer computes the advantages of a batch that lies in its transfer queue.

The batch is as verl's agent loops leave it: one rollout has two outputs that share its reward, one lacks a component, rows
come in any order, and a padding row closes the batch.
"""

import signal
import sys

import ray
import torch
import transfer_queue as tq
from test_verl import WEIGHTS, config
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from corrgrpo import corrgrpo


def main() -> None:
    cfg = config()
    trainer = object.__new__(get_trainer_cls(cfg.trainer.v1.trainer_mode))
    trainer.config = cfg

    parts = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [(f"g{i // 4}_{i % 4}_0", f"g{i // 4}", i) for i in range(8)] + [("g1_2_1", "g1", 6), ("pad_0_0", "pad", 0)]
    rows = rows[3:] + rows[:3]
    lengths = [1 + (7 * place) % 4 for place in range(len(rows))]
    fields = []
    for (_, uid, i), n in zip(rows, lengths):
        score = {"format": parts[i, 0].item(), "accuracy": None if i == 1 else parts[i, 1].item()}
        fields.append({"uid": uid, "response_mask": torch.ones(n, dtype=torch.long), "rm_scores": torch.zeros(n),
                       "rollout_log_probs": torch.zeros(n), "old_log_probs": torch.zeros(n),
                       "extra_fields": {"reward_extra_info": score}})
    keys = [key for key, _, _ in rows]
    tags = [{"status": "success"} for _ in rows]
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
    meta = trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=tags), {})
    got = tq.kv_batch_get(keys=meta.keys, partition_id="train", select_fields=["advantages", "returns"])

    want = torch.zeros(8, dtype=torch.float64)
    want[[0, 2, 3]] = corrgrpo(parts[[0, 2, 3]], 3, WEIGHTS)
    want[4:] = corrgrpo(parts[4:], 4, WEIGHTS)
    for (key, _, i), n, advantages, returns in zip(rows, lengths, got["advantages"].unbind(), got["returns"].unbind()):
        expected = torch.full((n,), 0.0 if key.startswith("pad") else want[i].item())
        assert torch.allclose(advantages, expected) and torch.equal(advantages, returns), (key, advantages, expected)
    print("advantages agree", flush=True)


if __name__ == "__main__":
    signal.alarm(200)                                                # ends with ray.shutdown below: no process is left
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("verl's transfer queue did not answer in 200 s"))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        tq.init()
        main()
        tq.close()
    finally:
        ray.shutdown()
