import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")      # threads that spin starve each other on shared cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")     # a name that is not here should fail at once, network or not

import pytest
import torch

import policy

torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def embedded():
    """The embedded model in float32 and its tokenizer; shared, so tests that change weights restore them."""
    return policy.load(policy.EMBEDDED)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random two-layer Llama with grouped heads and tied embeddings, with the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, pad_token_id=2,
        initializer_range=0.2))
    folder = tmp_path_factory.mktemp("tiny") / "model"
    policy.save(model, AutoTokenizer.from_pretrained(policy._embedded_model()), folder)
    return folder


@pytest.fixture
def tiny(tiny_folder):
    return policy.load(str(tiny_folder))[0]
