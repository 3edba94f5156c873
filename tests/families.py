"""Small tokenizers with chat templates in the style of three model families, written for these tests. Byte-level BPE with
merges, so that the same text has many tokenisations."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# SmolLM2: every role is written as it is called; tools are not known.
CHATML = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Qwen2.5: tools in the system turn; the tool results of one message share one user turn.
QWEN25 = """{%- set first = messages[0].content if messages[0].role == 'system' else 'You are made by nobody.' %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}{{ '\\n\\n<tools>' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{{ '\\n</tools>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (loop.first and m.role == 'system') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Qwen3: the same, but thoughts of earlier replies are left out, and "no thinking" is an empty thought that the prompt holds.
QWEN3 = QWEN25.replace("""{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}""",
                       """{%- if m.role == 'assistant' and not loop.last %}
        {{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}""").replace(
    """{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    """{{ '<|im_start|>assistant\\n' }}
    {%- if not (enable_thinking | default(true)) %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}""")

TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN25, "qwen3": QWEN3}
CORPUS = ["Hello, what is the balance of my account? The weather in Rome is sunny, and the answer is hello again.",
          '{"name": "get_balance", "arguments": {"account": "main"}} the tool response of the user and the assistant'] * 50


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Qwen3's tags are special tokens here, as some tokenizers have them; Qwen2.5's are added tokens; SmolLM2 has none."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if family != "chatml":
        t.add_tokens([AddedToken(tag, special=family == "qwen3", normalized=False)
                      for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=TEMPLATES[family])
