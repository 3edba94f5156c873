"""eval.py from the command line on a tiny model: resumable, repeatable, rescored, compared; and the statistics it prints."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eval as evaluation
import policy
import report
from envs import Task
from rewards import code
from rollout import encode

ROOT = Path(__file__).parent.parent


def arguments(out, model, *more):
    return ["--model", str(model), "--benchmarks", "starter,rlla_tiny", "--out", str(out), "--limit", "10",
            "--max-new-tokens", "12", "--rounds", "2", "sampler.batch_size=4", "train.threads=1", *more]


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_folder):
    out = tmp_path_factory.mktemp("results") / "base"
    assert evaluation.main(arguments(out, tiny_folder)) == 0
    return out


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "references"
    assert evaluation.main(arguments(out, "references")) == 0
    return out


def test_results_hold_every_sample_and_the_table(base, references):
    found = samples_of(base / "rlla_tiny")
    assert [s["id"] for s in found] == [f"test-{i}" for i in range(10)] and all(s["error"] is None for s in found)
    assert {"prompt", "replies", "rewards", "metrics", "finish_reason", "tokens", "sample"} <= set(found[0])
    summary = json.loads((references / "starter" / "summary.json").read_text())
    assert summary["model"] == "references" and summary["measures"]["Pass@1"] | {"low": 0, "scale": 100} == {
        "value": 100, "low": 0, "high": 100, "n": 10, "k": 10, "scale": 100}
    assert summary["measures"]["Efficiency"]["n"] == 10 and len(summary["measures"]["Efficiency"]["rounds"]) == 2
    table = (references / "table.md").read_text()
    assert "| references | 100.00 [72.2, 100.0] 10/10 |" in table and "all exact" in table and "Average Pass@1" not in table


def test_killed_at_any_moment_it_goes_on_and_gives_the_same_samples(base, tiny_folder, tmp_path):
    command = [sys.executable, "eval.py", *arguments(tmp_path / "base", tiny_folder)]
    file = tmp_path / "base" / "starter" / "samples.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (file.exists() and file.read_text()) and time.time() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = samples_of(file.parent)
    assert len(before) % 4 == 0 and len(before) >= 4            # whole batches
    with open(file, "a") as f:
        f.write('{"id": "cut off')                              # as if the kill had come in the middle of a line
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    for name in ("starter", "rlla_tiny"):
        assert samples_of(tmp_path / "base" / name) == samples_of(base / name)


def test_rescoring_judges_the_same_replies_again(references, tmp_path, capsys):
    shutil.copytree(references, tmp_path / "r")
    file = tmp_path / "r" / "starter" / "samples.jsonl"
    wrong = [s | {"rewards": {}, "error": "the sandbox died"} for s in samples_of(file.parent)]
    wrong[3]["replies"] = ["no code"]
    file.write_text("".join(json.dumps(s) + "\n" for s in wrong))
    assert evaluation.main(["--rescore", "--benchmarks", "starter", "--limit", "10", "--rounds", "0",
                            "--out", str(tmp_path / "r")]) == 0
    assert [s["rewards"]["pass"] for s in samples_of(file.parent)] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert json.loads((file.parent / "summary.json").read_text())["measures"]["Pass@1"]["k"] == 9
    assert "90.00 [59.6, 98.2] 9/10" in capsys.readouterr().out


def test_rounds_of_efficiency_that_were_run_are_kept(references, tmp_path):
    shutil.copytree(references, tmp_path / "r")
    file = tmp_path / "r" / "starter" / "summary.json"

    def rounds():
        assert evaluation.main(["--model", "references", "--benchmarks", "starter", "--limit", "10", "--rounds", "2", "--out",
                                str(tmp_path / "r"), "--max-new-tokens", "12"]) == 0
        return [json.loads(line)["faster"] for line in (file.parent / "efficiency.jsonl").read_text().splitlines()]

    whole = rounds()
    (file.parent / "efficiency.jsonl").write_text(json.dumps({"key": "other programs", "faster": {}}) + "\n")
    assert rounds() != [{}, {}]
    first, _ = (references / "starter" / "efficiency.jsonl").read_text().splitlines()
    (file.parent / "efficiency.jsonl").write_text(first + "\n")
    again = rounds()
    assert again[0] == whole[0] and len(again) == 2 and set(again[1]) == set(whole[0])
    measure = json.loads(file.read_text())["measures"]["Efficiency"]
    assert measure["rounds"] == [100 * sum(r.values()) / 10 for r in again]


def test_several_samples_give_pass_at_k(tiny_folder, tmp_path):
    more = ["--samples", "2", "--benchmarks", "starter", "--limit", "2"]
    assert evaluation.main(arguments(tmp_path, tiny_folder, *more)) == 0
    found = samples_of(tmp_path / "starter")
    assert [(s["sample"], s["replies"] == found[0]["replies"]) for s in found[:2]] == [(0, True), (1, False)]
    assert json.loads((tmp_path / "starter" / "summary.json").read_text())["measures"]["Pass@2"]["n"] == 2


@pytest.mark.parametrize("more, words", [
    (["--benchmarks", "humanevl"], "there is no 'humanevl'; there are starter"), (["--samples", "0"], "at least 1"),
    (["--model", "nobody/nothing"], "nobody/nothing"), (["--samples", "3", "--temperature", "0"], "3 times the same reply"),
    (["starter.timeot=3"], "unknown key starter.timeot"), (["sampler.batch=3"], "did you mean 'batch_size'"),
    (["--benchmarks", "livecodebench"], "livecodebench.data=FILE"),
    (["--benchmarks", "rlla", "rlla.data=none.jsonl"], "none.jsonl"),
    (["sampler.max_new_tokens=5"], "sampler.max_new_tokens changes nothing here"), (["eval.limit=3"], "changes nothing here"),
    (["--compare", "nowhere"], "neither results of eval.py nor a training run"), (["--rescore"], "there are no samples"),
])
def test_bad_input_is_one_line_before_anything_is_loaded(tmp_path, tiny_folder, capsys, monkeypatch, more, words):
    monkeypatch.setattr(evaluation.policy, "load", lambda name: pytest.fail("loaded"))
    monkeypatch.setenv("CORRGRPO_DATA", str(tmp_path))
    assert evaluation.main(arguments(tmp_path / "out", tiny_folder, *more)) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


def test_replies_of_two_kinds_never_share_a_folder(base, capsys):
    assert evaluation.main(arguments(base, "references")) == 2
    assert "holds samples with model =" in capsys.readouterr().err


def test_a_folder_holds_one_models_results(tiny_folder, tmp_path, capsys):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    first, other = arguments(tmp_path / "out", model), arguments(tmp_path / "out", "references")
    assert evaluation.main([*first, "--benchmarks", "rlla_tiny", "--limit", "1"]) == 0
    assert evaluation.main([*other, "--benchmarks", "starter", "--limit", "1"]) == 2    # they would share a row
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1                                            # trained on, under the same name
    (model / "model.safetensors").write_bytes(weights)
    assert evaluation.main([*first, "--benchmarks", "rlla_tiny", "--limit", "1"]) == 2
    messages = capsys.readouterr().err.splitlines()
    assert "holds samples with model =" in messages[-2] and "holds samples with weights =" in messages[-1]


def test_a_long_prompt_shortens_nobody_elses_reply(tiny_folder, tmp_path):
    tokenizer = policy.load(str(tiny_folder))[1]
    assert evaluation.main([*arguments(tmp_path, tiny_folder), "--benchmarks", "starter", "--limit", "4", "--rounds", "0",
                            "--max-new-tokens", "420"]) == 0
    found = samples_of(tmp_path / "starter")
    room = [512 - len(encode(tokenizer, Task(s["id"], s["prompt"]))) for s in found]
    assert min(room) < 420
    assert [s["tokens"] for s in found if s["finish_reason"] == "length"] == [
        min(420, r) for s, r in zip(found, room) if s["finish_reason"] == "length"] != []


def test_runs_side_by_side(base, references, tmp_path, capsys):
    run = tmp_path / "trained"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "reward/total": i / 9}) + "\n" for i in range(9)))
    assert evaluation.main(["--compare", str(base), str(references), str(run), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "references - base" in text and "+100.00 (p = 0.002)" in text                    # 10 to 0 of 10 pairs
    for name in ("correctness_efficiency", "training"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "out" / f"{name}.svg").read_text()


# ---- statistics ----------------------------------------------------------------------------------------------------------


def test_wilsons_interval_and_the_bootstrap():
    m = report.interval([1.0] * 48 + [0.0] * 23)                # the paper's 67.61 % = 48/71
    assert (round(m["value"], 2), round(m["low"], 1), round(m["high"], 1), m["k"]) == (67.61, 56.1, 77.3, 48)
    m = report.interval([0.2, 0.4, 0.9, 0.5] * 10)
    assert m["value"] == pytest.approx(50) and 40 < m["low"] < 45 < 55 < m["high"] < 60
    assert report.interval([3.5, 4.5])["value"] == 4.0          # no percent
    turns = report.interval([1.0] * 5, share=False)             # replies, of which every episode had one: neither
    assert turns["value"] == turns["low"] == 1.0 and "k" not in turns


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for n, correct, k in ((5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 1, 1), (6, 5, 2)):
        draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
        assert report.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_paired_comparisons():
    first = {str(i): float(i < 5) for i in range(20)}
    second = {str(i): float(i < 13) for i in range(30)}         # eight won, none lost, ten that the other has not
    found = report.paired(first, second)
    assert found["n"] == 20 and found["difference"] == pytest.approx(8 / 20)
    assert found["p"] == pytest.approx(2 / 2**8) and found["test"] == "McNemar"
    assert report.paired(first, first)["p"] == 1.0
    better = {k: v + 0.1 + 0.01 * int(k) for k, v in first.items()}
    assert report.paired(first, better)["p"] < 0.01 and report.paired(better, better)["p"] == 1.0
    assert math.isnan(report.paired(first, {})["difference"])
    few = report.paired({"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.2, "b": 0.25, "c": 0.5})
    assert few["p"] == pytest.approx(0.25)                      # all three of 2^3 signs alike, on either side


def test_the_pareto_frontier():
    assert report.pareto([(1, 5), (2, 4), (2, 3), (0, 5), (3, 1), (2.5, 1)]) == [(1, 5), (2, 4), (3, 1)]


def test_efficiency_of_equal_slower_and_faster_programs():
    """Against itself about half, padded with work never, twice as fast always; beside busy processes too."""
    row = {"prompt": "", "entry_point": "f", "test": "def check(candidate):\n    assert candidate(100000) == 4999950000\n"}
    work = "def f(n):\n    total = 0\n    for _ in range({}):\n        total = sum(i for i in range(n))\n    return total"
    same, slow, fast = (work.format(k) for k in (4, 8, 2))
    burner = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        for first, low, high in ((slow, 0, 0.05), (fast, 0.95, 1), (same, 0.25, 0.75)):
            found = code.paired_rounds([(row, first, same)] * 4, rounds=8)
            assert found["pairs"] == 4 and len(found["rounds"]) == 8
            assert low <= sum(found["rounds"]) / 8 <= high, (first, found)
    finally:
        for process in burner:
            process.kill()
            process.wait()
    assert code.paired_rounds([(row, "def f(n): return 0", same)])["pairs"] == 0    # only where both pass
