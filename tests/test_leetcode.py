import ast
import gzip
import json
import os
from pathlib import Path

import pytest

from envs.leetcode import NEEDED, LeetCode, load_rows
from rewards import code

DATA = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data") / "leetcode"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set CORRGRPO_DATA")


def starter():
    return {split: load_rows("starter", split) for split in ("train", "test")}


def test_the_starter_problems_are_many_whole_and_apart():
    rows = starter()
    every = rows["train"] + rows["test"]
    assert len(every) >= 120 and len({row["task_id"] for row in every}) == len({row["query"] for row in every}) == len(every)
    assert all({row["difficulty"] for row in rows[split]} == {"Easy", "Medium", "Hard"} for split in rows)
    for row in every:
        asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(row["test"])))
        assert asserts >= 5, row["task_id"]
        assert row["starter_code"].strip() in row["query"] and row["completion"] not in row["query"]
    assert sum("Slow reference" in row["tags"] for row in every) >= 20
    assert {row["difficulty"] for row in load_rows("starter-easy", "train")} == {"Easy"}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_starter_reference_passes_and_an_empty_answer_does_not(split):
    rows = starter()[split]
    fenced = [f"```python\n{row['completion']}```" for row in rows]
    for row, result in zip(rows, code.score(fenced, rows), strict=True):
        assert result["error"] is None and result["status"] == "passed" and result["ast"] == 1, (row["task_id"], result)
    empty = [f"```python\n{row['starter_code']}\n        pass\n```" for row in rows]
    assert not any(result["pass"] for result in code.score(empty, rows))


def test_a_fast_answer_to_a_slow_reference_earns_efficiency():
    row = next(row for row in load_rows("starter", "train") if row["task_id"] == "total-of-list")
    name = row["entry_point"]
    argument = ast.parse(row["starter_code"] + " pass").body[0].args.args[0].arg
    fast = f"```python\ndef {name}({argument}):\n    return sum({argument})\n```"
    env = LeetCode()
    episode = env.start(next(t for t in env.tasks("train") if t.id == row["task_id"]))
    assert episode.step(fast) == []
    (score,) = env.score([episode])
    assert score.rewards["pass"] == 1 and score.rewards["efficiency"] > 0.5 and tuple(score.rewards) == env.reward_names


@needs_data
@pytest.mark.parametrize("name, count", [("LeetCodeDataset-v0.3.1-test", 228), ("LeetCodeDataset-v0.2.0-train", 1890)])
def test_both_schemas_read_alike_from_every_kind_of_file(tmp_path, monkeypatch, name, count):
    import pyarrow
    import pyarrow.parquet

    packed = DATA / f"{name}.jsonl.gz"
    rows = load_rows(str(packed), "train")
    assert len(rows) == count
    plain = tmp_path / "rows.jsonl"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    used = [{key: row[key] for key in NEEDED} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(used), tmp_path / "rows.parquet")
    assert load_rows(str(plain), "train") == rows
    assert [r["query"] for r in load_rows(str(tmp_path / "rows.parquet"), "train")] == [r["query"] for r in rows]
    monkeypatch.setenv("CORRGRPO_DATA", str(DATA.parent))
    schema, _, split = name.rpartition("-")
    tasks = LeetCode(data=f"leetcode/{schema}-{{split}}.jsonl.gz").tasks(split)
    assert len(tasks) == count and tasks[0].messages == [{"role": "user", "content": rows[0]["query"]}]


def test_a_file_cut_off_in_the_middle_is_named(tmp_path):
    row = json.dumps(starter()["train"][0])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress((row + "\n").encode() * 50)[:-40])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz, after line .*unreadable"):
        load_rows(str(tmp_path / "cut.jsonl.gz"), "train")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load_rows(str(tmp_path / "bad.parquet"), "train")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        load_rows(str(tmp_path / "empty.jsonl"), "train")


def test_a_hub_name_that_cannot_be_fetched_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"nobody/no-such-set.*(could not be fetched|pip install datasets)"):
        load_rows("nobody/no-such-set", "train")
