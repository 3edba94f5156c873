"""The environment of tool calls: rows of every schema, the rows made here, templates that open the thoughts themselves."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import policy
import rollout
from envs.rlla import RLLA, TOOLS, tiny
from rewards import tool
from sampler import Sample

DATA = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data") / "rlla"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set CORRGRPO_DATA")


@needs_data
def test_every_schema_reads_alike_and_damaged_references_are_named_and_not_trained_on(capsys, monkeypatch):
    monkeypatch.setenv("CORRGRPO_DATA", str(DATA.parent))
    packed, parquet = RLLA("rlla/rlla_{split}.jsonl.gz"), RLLA(str(DATA / "{split}.parquet"))
    ours, theirs = packed.tasks("test"), parquet.tasks("test")
    assert [(t.id, t.messages, t.data) for t in ours] == [(t.id, t.messages, t.data) for t in theirs] and len(ours) == 80
    assert "rows 9, 25, 35, 36, 44 are damaged (kept, as published)" in capsys.readouterr().out
    assert len(RLLA(str(DATA / "test.parquet")).tasks("train")) == 75
    assert "(left out)" in capsys.readouterr().out and packed.notes
    sft = RLLA(str(DATA / "rlla_sft.json.gz")).tasks("train")
    assert len(sft) == 376 and [m["role"] for m in sft[0].messages] == ["system", "user"]


def test_a_row_of_no_known_schema_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], "ground_truth": "b"}) + "\n" + '{"prompt": "a"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2: no RLLA row"):
        RLLA(str(file)).tasks("train")
    with pytest.raises(ValueError, match="splits train, test"):
        RLLA().tasks("validation")


def test_scores_are_of_tool_rows_and_an_unusable_reference_is_no_score():
    env = RLLA()
    rows = env.tasks("test")
    called, direct = (next(t for t in rows if ("<tool_call>" in t.data) is c) for c in (True, False))
    episodes = [env.start(t) for t in (called, direct)]
    for e in episodes:
        assert e.step(env.reference(e.task)) == []
    first, second = env.score(episodes)
    assert first.rewards == {"name": 0.5, "parameter": 1.0, "value": 1.5, "format": 1.0} and first.metrics["all_exact"] == 1
    assert second.rewards == {"name": 0, "parameter": 0, "value": 0, "format": 1} and second.metrics["all_exact"] is None
    episodes[0].task.data = "<think> broken"
    assert env.score(episodes)[0].error and env.score(episodes)[1].error is None


def test_the_rows_made_here_are_many_right_and_held_out():
    made, rows = json.loads(TOOLS.read_text()), {split: tiny(split) for split in ("train", "test")}
    assert rows["train"] == tiny("train")
    assert len(made["tools"]) + len(made["held_out_tools"]) >= 30
    names = {split: {call["name"] for _, r in rows[split] for call in _calls(r)} for split in rows}
    held_out = {t["name"] for t in made["held_out_tools"]}
    assert not names["train"] & held_out and len(names["test"] & held_out) >= 8 and names["test"] - held_out
    for split in rows:
        prompts = [str(r["prompt"]) for _, r in rows[split]]
        assert all(tool.score(r["ground_truth"], r["ground_truth"])["all_exact"] for _, r in rows[split])
        assert {len(_calls(r)) for _, r in rows[split]} == {0, 1, 2, 3}
        for _, r in rows[split]:
            for call in _calls(r):
                assert f"Name: {call['name']}\n" in r["prompt"][0]["content"] and set(call) == {"name", "parameters"}
    kinds = {type(value) for _, r in rows["train"] for call in _calls(r) for value in call["parameters"].values()}
    assert kinds == {str, int, float, bool} and len(set(prompts)) == len(prompts)
    seen = {ask for t in made["tools"] for ask in t["asks"]}
    assert not seen & {ask for t in made["tools"] for ask in t["held_out_asks"]}


def _calls(row):
    text = row["ground_truth"]
    return [json.loads(line) for line in text.split("<tool_call>\n")[-1].split("\n</tool_call>")[0].split("\n")
            ] if "<tool_call>" in text else []


class Parrot:
    """A sampler that says the same to everyone."""

    def __init__(self, ids):
        self.ids = ids

    def generate(self, prompts, n, **options):
        return [[Sample(list(self.ids), [0.0] * len(self.ids), "stop") for _ in range(n)] for _ in prompts]


@pytest.mark.parametrize("opens", [True, False])
def test_a_template_that_opens_the_thoughts_loses_no_format(opens):
    """Qwen3 Thinking's template ends in "<think>": the sampled text begins within the thoughts."""
    tokenizer = AutoTokenizer.from_pretrained(policy._embedded_model())
    tokenizer.chat_template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                               "{% if add_generation_prompt %}<|im_start|>assistant\n" + "<think>\n" * opens + "{% endif %}")
    env = RLLA()
    task = next(t for t in env.tasks("test") if "<tool_call>" in t.data)
    prompt = rollout.encode(tokenizer, task)
    assert rollout.opens_thinking(tokenizer, prompt) is opens
    text = task.data.removeprefix("<think>") if opens else task.data
    sampled = tokenizer(text, add_special_tokens=False)["input_ids"] + [rollout.closing(tokenizer, {2})]
    got = rollout.collect(env, Parrot(sampled), tokenizer, [(task, prompt)], 2, seeds=[0], max_new_tokens=99, temperature=1.0)
    rollout.score(env, got)
    assert [r.score.rewards["format"] for r in got] == [1, 1] and got[0].score.metrics["all_exact"] == 1
    assert got[0].ids == sampled
