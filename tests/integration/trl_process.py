"""One of two processes of test_trl.py, started by torch.distributed.run: a few steps with a tiny model.

Every process tells the others which prompt each of its rollouts had and what it was rewarded with; grouped by prompt, these
must give the advantages that the recipe hands to each process, in the order of that process's own rollouts.
"""

import sys

import torch
from datasets import Dataset
from recipes import run
from test_trl import config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corrgrpo import corrgrpo

PROMPTS = ["one", "two", "three", "four", "five", "six"]


def main(folder: str) -> None:
    words = ["<pad>", "<eos>", *PROMPTS, *(f"w{i}" for i in range(24))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1))
    mine = []

    def first(prompts, completions, completion_ids, **kwargs):
        mine.append(list(prompts))
        return [float(sum(ids)) for ids in completion_ids]

    def second(completion_ids, **kwargs):
        return [10.0 * (ids[0] % 3) for ids in completion_ids]

    class Checked(run("trl")["CorrGRPOTrainer"]):
        def _calculate_rewards(self, *args, **kwargs):
            rewards = super()._calculate_rewards(*args, **kwargs)
            n = len(mine[-1])
            self.own = rewards[self.accelerator.process_index * n :][:n]
            return rewards

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, (mine[-1], self.own))
            prompts = [prompt for prompts, _ in everyone for prompt in prompts]
            rewards = torch.cat([own for _, own in everyone])
            assert len(prompts) == 12 and {prompts.count(prompt) for prompt in prompts} == {4}
            assert any(prompt in everyone[1][0] for prompt in everyone[0][0]), "no group lies on both processes"
            ids = torch.tensor([PROMPTS.index(prompt) for prompt in prompts])
            want = corrgrpo(rewards, ids, torch.tensor([1.0, 0.25]))[self.accelerator.process_index * 6 :][:6]
            assert torch.allclose(output["advantages"], want, rtol=1e-5, atol=1e-7), (output["advantages"], want)
            return output

    trainer = Checked(model, reward_funcs=[first, second], processing_class=tokenizer,
                      train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
                      args=config(folder, max_steps=3, per_device_train_batch_size=6, num_generations=4,
                                  max_completion_length=6, reward_weights=[1.0, 0.25], gradient_checkpointing=False))
    trainer.train()
    assert len(mine) == 3 and torch.distributed.get_world_size() == 2
    print("advantages agree", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
