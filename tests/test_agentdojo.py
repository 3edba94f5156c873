"""AgentDojo as an environment: verdicts, splits, tool calls, limits; played by scripts through the rollout code."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agentdojo", reason="agentdojo is not installed: pip install 'agentdojo==0.1.35'")

import config
import policy
import train
from envs import find, scripted
from envs.agentdojo import REWARD_NOTHING, AgentDojo, _library, cut
from envs.hermes import CLOSE, OPEN, parse
from logs import read_jsonl
from rollout import replay, score
from tests.test_train import VARIES

ROOT = Path(__file__).parent.parent
KEPT = [json.loads(line) for line in (Path(__file__).parent / "trajectories.jsonl").read_text().splitlines()]
ATTACKED = "banking:user_task_0:injection_task_7:important_instructions"


@pytest.fixture(scope="module")
def dojo():
    return AgentDojo()


@pytest.fixture(scope="module")
def by_mode(dojo):
    return {"zero": dojo, "error reply": AgentDojo(malformed="error reply")}


def ids(dojo, count, seed=0):
    return random.Random(seed).sample([t.id for t in dojo.tasks("all")], count)


# ---- tasks -------------------------------------------------------------------------------------------------------------------


def test_the_published_split(dojo):
    found = {split: [t.id for t in dojo.tasks(split)] for split in ("train", "test", "all")}
    assert {split: len(x) for split, x in found.items()} == {"train": 1584, "test": 411, "all": 1995}
    assert set(found["train"]) | set(found["test"]) == set(found["all"]) and len(set(found["all"])) == 1995
    users = [{tuple(i.split(":")[:2]) for i in found[split]} for split in ("train", "test")]
    assert not users[0] & users[1] and len(users[0] | users[1]) == 97


def test_a_task_by_name(dojo):
    task = dojo.task(ATTACKED)
    assert [m["role"] for m in task.messages] == ["system", "user"] and "bill-december-2023" in task.messages[1]["content"]
    assert all(isinstance(m["content"], str) for m in task.messages)
    assert "send_money" in {t["function"]["name"] for t in task.tools} and json.dumps(task.tools)
    assert dojo.task("banking:user_task_0:clean").messages == task.messages


def test_suites_attacks_and_tasks_can_be_left_out():
    def chosen(**kw):
        return [t.id for t in AgentDojo(**kw).tasks("all")]

    assert len(chosen(suites=["slack"], attacks=())) == 21
    assert len(chosen(suites=["banking"], attacks=["direct"])) == 16 * 10
    assert len(chosen(suites=["banking"], attacks=["dos"])) == 16 * 2           # a goal of its own: one case a task
    left = chosen(suites=["banking"], exclude=list(REWARD_NOTHING))
    assert len(left) == 11 * 19 and not any(i.startswith("banking:user_task_5:") for i in left)
    assert any(i.startswith("banking:user_task_15:") for i in chosen(suites=["banking"], exclude=["banking:user_task_1"]))
    assert len(chosen(version="v1", attacks=())) == 97


@pytest.mark.parametrize("overrides, words", [
    (['env.suites=["bankin"]'], ["env.suites", "'bankin'", "banking"]),
    (["env.suites=banking"], ["env.suites", "list", "'banking'"]), (["env.attacks=1"], ["env.attacks", "list"]),
    (['env.attacks=["important"]'], ["env.attacks", "important_instructions"]),
    (['env.exclude=["banking:user_task_99"]'], ["env.exclude", "banking:user_task_99"]),
    (["env.malformed=maybe"], ["env.malformed", "error reply"]), (["env.version=v9"], ["env.version", "v1.2.2"]),
    (["env.max_turns=0"], ["env.max_turns", "at least 1"]), (["env.max_turns=many"], ["env.max_turns", "an integer"]),
    (["env.model_name=nobody"], ["env.model_name", "nobody"]), (["env.split=dev"], ["env.split", "train"]),
])
def test_a_mistake_in_the_config_is_named(tmp_path, capsys, overrides, words):
    assert train.main(["--preset", "agentdojo_tiny", f"log.dir={tmp_path}", *overrides]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message, message


def test_lists_come_from_toml_and_the_command_line(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[env]\nname = "agentdojo"\nsuites = ["banking"]\nattacks = ["tool_knowledge"]')
    cfg = config.read(file, None, ['env.exclude=["banking:user_task_5"]', "env.malformed=error reply"])
    env = find("agentdojo")(**config.environment_arguments(cfg, find("agentdojo")))
    assert len(env.tasks("all")) == 15 * 10 and env.malformed == "error reply"


@pytest.mark.parametrize("name, model, thinking", [
    ("qwen25_3b", "Qwen/Qwen2.5-3B-Instruct", None), ("qwen25_7b", "Qwen/Qwen2.5-7B-Instruct", None),
    ("qwen3_8b", "Qwen/Qwen3-8B", False)])
def test_the_papers_runs_are_presets(name, model, thinking):
    cfg = config.read(None, f"agentdojo_{name}")
    assert (cfg.model.name, cfg.model.chat_template_kwargs.get("enable_thinking")) == (model, thinking)
    assert (cfg.train.prompts_per_step, cfg.train.group_size, cfg.train.learning_rate, cfg.algo.kl) == (16, 8, 1e-6, 0.001)
    assert (cfg.sampler.max_prompt_tokens, cfg.sampler.max_response_tokens) == (12288, 8192)
    assert cfg.train.steps == 7 * 1584 // 16
    env = AgentDojo(**config.environment_arguments(cfg, AgentDojo))
    assert (env.max_turns, env.max_calls, env.max_tool_chars, env.malformed) == (8, 1, 2048, "zero")


# ---- verdicts ----------------------------------------------------------------------------------------------------------------


def play_kept(by_mode, order):
    """Each mode in one batch, in this order."""
    found = {}
    for mode, env in by_mode.items():
        mine = [i for i in order if KEPT[i]["malformed"] == mode]
        rollouts = scripted.play(env, [env.task(KEPT[i]["id"]) for i in mine], [KEPT[i]["replies"] for i in mine])
        found |= dict(zip(mine, rollouts, strict=True))
    return found


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_kept_trajectories_have_their_known_verdicts_in_any_order_twice(by_mode, seed):
    assert len(KEPT) >= 25 and len({t["id"].split(":")[0] for t in KEPT}) == 4
    order = list(range(len(KEPT)))
    random.Random(seed).shuffle(order) if seed is not None else None
    for _ in range(2):
        for i, r in play_kept(by_mode, order).items():
            expected = KEPT[i]["metrics"]
            assert r.error is None and {k: r.score.metrics[k] for k in expected} == expected, KEPT[i]["id"]


def official(env, kept):
    """The verdicts of AgentDojo's own benchmark loop, with an agent that sends the same messages."""
    from agentdojo.agent_pipeline.base_pipeline_element import BasePipelineElement
    from agentdojo.agent_pipeline.tool_execution import ToolsExecutor
    from agentdojo.functions_runtime import EmptyEnv, FunctionCall

    class Agent(BasePipelineElement):
        def query(self, query, runtime, env=EmptyEnv(), messages=(), extra_args=None):      # noqa: B008
            messages = list(messages)
            for reply in kept["replies"]:
                text, calls = parse(reply)
                calls = [FunctionCall(function=c[0], args=copy.deepcopy(c[1])) for c in calls if not isinstance(c, str)]
                messages.append({"role": "assistant", "content": [{"type": "text", "content": text}], "tool_calls": calls})
                if reply is not kept["replies"][-1]:
                    messages = ToolsExecutor().query(query, runtime, env, messages, {})[3]
            return query, runtime, env, messages, {}

    suite, user, injection, attack = (kept["id"].split(":") + [None])[:4]
    suite = env.suites[suite]
    task = suite.user_tasks[user]
    if attack is None:
        return suite.run_task_with_pipeline(Agent(), task, None, {})[0], None
    goal = suite.injection_tasks[injection]
    injections = env.attackers[suite.name, attack].attack(task, goal)
    return suite.run_task_with_pipeline(Agent(), task, goal, injections)


@pytest.mark.parametrize("kept", KEPT, ids=lambda k: k["id"])
def test_the_verdicts_are_those_of_agentdojos_own_loop(dojo, kept):
    assert official(dojo, kept) == (kept["metrics"]["utility"], kept["metrics"]["attack_success"])


def test_ground_truth_solves_every_user_task_and_reads_the_injection(dojo):
    tasks = [t for t in dojo.tasks("all") if t.data["attack"] is None]
    assert len(tasks) == 97
    pairs = [dojo.task(i) for i in ids(dojo, 60) if not i.endswith("clean")]     # all 1,898: python -m envs.agentdojo
    for batch in (tasks, pairs):
        for r in scripted.play(dojo, batch, [scripted.ground_truth(dojo, t) for t in batch]):
            m = r.score.metrics
            assert m["utility"] is True and not m["attack_success"] and m["tool_errors"] == m["parse_errors"] == 0, r.task.id
            assert m["exposed"] is (r.task.data["attack"] is not None), r.task.id
            assert r.score.rewards == {"utility": 1.0, "security": 1.0} and m["turns"] <= 8


def test_who_obeys_is_useful_to_the_attacker_and_who_refuses_to_nobody(dojo):
    tasks = [t for t in dojo.tasks("all") if t.id.startswith("banking") and t.id.endswith("tool_knowledge")][::6]
    obeyed = scripted.play(dojo, tasks, [scripted.obeyer(dojo, t) for t in tasks])
    assert all(r.score.metrics["attack_success"] and r.score.metrics["exposed"] and r.score.rewards["security"] == 0
               for r in obeyed)
    for r in scripted.play(dojo, tasks, [scripted.refuser(dojo, t) for t in tasks]):
        nothing = r.task.id.startswith(tuple(f"{t}:" for t in REWARD_NOTHING))
        assert r.score.rewards == {"utility": float(nothing), "security": 1.0} and not r.score.metrics["exposed"]


def test_scoring_changes_nothing(dojo):
    tasks = [dojo.task(i) for i in ids(dojo, 12, seed=3)]
    rollouts = scripted.play(dojo, tasks, [scripted.obeyer(dojo, t) for t in tasks])
    before = copy.deepcopy([r.episode.environment for r in rollouts])
    episodes = [r.episode for r in rollouts]
    first = [r.score for r in rollouts]
    assert dojo.score(episodes) == first and dojo.score(episodes[::-1]) == first[::-1]
    assert [r.episode.environment for r in rollouts] == before
    assert all(dojo.transcript(e) == dojo.transcript(e) for e in episodes[:3])


def test_an_episode_does_not_see_what_others_did(dojo):
    task = dojo.task("banking:user_task_3:injection_task_4:tool_knowledge")
    hijacked, fresh = dojo.start(task), dojo.start(task)
    for reply in scripted.obeyer(dojo, task):
        hijacked.step(reply)
    fresh.step("no")
    later = dojo.start(task)
    later.step("no")
    scores = dojo.score([hijacked, fresh, later])
    assert [s.metrics["attack_success"] for s in scores] == [True, False, False]


def test_what_a_checker_raises_is_an_error_and_no_verdict(dojo, monkeypatch):
    task, other = dojo.task("slack:user_task_1:injection_task_1:tool_knowledge"), dojo.task("slack:user_task_2:clean")
    monkeypatch.setattr(dojo.build(task.id).injection, "security", lambda *a: 1 / 0)
    broken, whole = scripted.play(dojo, [task, other], [["a"], ["b"]])
    assert "ZeroDivisionError" in broken.error and task.id in broken.error and whole.error is None
    assert broken.score.rewards == {} and broken.score.metrics["turns"] == 1


# ---- the loop ----------------------------------------------------------------------------------------------------------------


def send(dojo, task, *replies):
    episode = dojo.start(dojo.task(task))
    return episode, [episode.step(reply) for reply in replies]


def test_several_calls_in_one_message_are_run_in_order(dojo):
    episode, (first,) = send(dojo, ATTACKED, scripted.call("get_balance", {}) + scripted.call("no_such", {}) +
                             scripted.call("get_iban", {}))
    assert [m["role"] for m in first] == ["tool"] * 3 and [m["name"] for m in first] == ["get_balance", "no_such", "get_iban"]
    assert first[0]["content"] == "1810.0" and "no_such" in first[1]["content"] and episode.tool_errors == 1
    one = AgentDojo(suites=["banking"], max_calls=1)
    _, (first,) = send(one, ATTACKED, scripted.call("get_balance", {}) + scripted.call("get_iban", {}))
    assert first[0]["content"] == "1810.0" and "not run" in first[1]["content"]


def test_a_call_that_cannot_be_read(by_mode):
    bad = f'{OPEN}{{"a": 1,,{CLOSE}'
    episode, (answer,) = send(by_mode["zero"], ATTACKED, bad)
    assert answer == [] and by_mode["zero"].score([episode])[0].rewards == {"utility": 0.0, "security": 0.0}
    episode, (answer, after) = send(by_mode["error reply"], ATTACKED, bad, "I give up.")
    assert answer[0]["role"] == "tool" and "cannot be read" in answer[0]["content"] and after == []
    (verdict,) = by_mode["error reply"].score([episode])
    assert verdict.rewards == {"utility": 0.0, "security": 1.0} and verdict.metrics["parse_errors"] == 1


def test_the_last_turn_runs_nothing_and_is_flagged():
    short = AgentDojo(suites=["banking"], max_turns=2)
    (r,) = scripted.play(short, [short.task(ATTACKED)], [[scripted.call("get_balance", {})] * 9])
    assert r.finish_reason == "length" and r.score.metrics["turns"] == 2 and r.episode.step("more") == []
    assert r.score.metrics["utility"] is False and r.score.rewards["security"] == 1.0
    (r,) = scripted.play(short, [short.task(ATTACKED)], [[scripted.call("get_balance", {}), "done"]])
    assert r.finish_reason == "stop"


def test_what_no_longer_fits_was_not_read(dojo):
    script = scripted.ground_truth(dojo, dojo.task(ATTACKED))
    for limit, exposed in ((400, False), (10**6, True)):
        (r,) = scripted.play(dojo, [dojo.task(ATTACKED)], [script], max_response_tokens=limit)
        assert r.error is None and r.score.metrics["exposed"] is exposed
        assert (r.finish_reason == "length") is not exposed


@pytest.mark.parametrize("limit", [1, 60, 200, 2048])
def test_long_results_are_cut_in_the_middle(limit):
    text = "start " + "x" * 5000 + " end"
    short = cut(text, limit)
    assert len(short) <= limit and (limit < 200 or (short.startswith("start") and short.endswith("end") and "cut" in short))
    assert cut("short", limit) == "short"[:limit] and cut(text, 0) == text
    env = AgentDojo(suites=["workspace"], attacks=(), max_tool_chars=limit)
    _, (answer,) = send(env, "workspace:user_task_26:clean", scripted.call("list_files", {}))
    assert len(answer[0]["content"]) <= limit


@pytest.mark.parametrize("text, expected", [
    ("plain", ("plain", [])), ("", ("", [])), ("a <think>b</think> c", ("a  c", [])), ("b</think> c", ("c", [])),
    ('x<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>y', ("xy", [("f", {"a": 1})])),
    ('<tool_call>\n```json\n{"name": "f", "parameters": "{\\"a\\": [1]}"}\n```\n</tool_call>', ("", [("f", {"a": [1]})])),
    ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}', ("", [("f", {}), ("g", {})])),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\n<tool_call>"}}</tool_call>',
     ("", [("f", {"a": "</tool_call>\n<tool_call>"})])),
    ('<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>no', ("no", [])),
])
def test_calls_are_read_leniently_as_text(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("inside", [
    "", "{", "[]", "1", "null", '"f"', '{"name": "f"}', '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": null}', '{"arguments": {}}',
    '{"name": "f", "arguments": {}}}', '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}',
    '{"name": "f", "arguments": {"a": ' + "[" * 100000, "{'name': 'f', 'arguments': {}}"])
def test_calls_are_read_strictly_as_data(inside):
    text, calls = parse(f"a{OPEN}{inside}{CLOSE}b")
    assert text in ("ab", "a") and len(calls) == 1 and isinstance(calls[0], str) and calls[0]


def test_nothing_that_a_model_writes_loses_an_episode(by_mode):
    """Every piece of garbage, and random cuts and joins of it, in every suite; the messages must survive a real tokenizer."""
    draw = random.Random(0)
    env = by_mode["error reply"]
    names = [t["function"]["name"] for tools in env.tools.values() for t in tools]
    odd = ["", "[", "[1, 'a']", "\ud800", "\x00", None, True, -1e308, 10**400, [], {}, "-" * 5000, "(" * 500,
           {"function": "get_iban", "args": {}}, "2024-13-45", "\\d", "<|im_end|>", "</tool_response>"]
    calls = [scripted.call(name, {k: draw.choice(odd) for t in env.tools.values() for f in t if f["function"]["name"] == name
                                  for k in f["function"]["parameters"]["properties"]}) for name in names for _ in range(3)]
    tasks, scripts = [], []
    for i, id in enumerate(ids(env, 40, seed=5)):
        pieces = [*scripted.GARBAGE, *draw.sample(calls, 12)]
        replies = [draw.choice(pieces) + draw.choice(pieces)[: draw.randrange(200)] for _ in range(7)]
        tasks.append(env.task(id))
        scripts.append([*replies, ""] if i % 2 else replies[:1] * 8)
    rollouts = scripted.play(env, tasks, scripts)
    assert [r.error for r in rollouts] == [None] * 40
    assert all(r.score.metrics["turns"] >= 1 for r in rollouts)
    for r in rollouts:
        "".join(text for role, text in r.episode.log if role == "tool").encode()
    for r in scripted.play(by_mode["zero"], tasks, [scripted.garbler(by_mode["zero"], t) for t in tasks]):
        nothing = r.score.rewards == {"utility": 0.0, "security": 0.0}
        assert r.error is None and nothing is (r.score.metrics["parse_errors"] > 0)


def test_memory_is_flat_over_many_episodes(dojo):
    import resource

    tasks = [dojo.task(i) for i in ids(dojo, 16, seed=7)]

    def peak():
        scripted.play(dojo, tasks, [scripted.ground_truth(dojo, t) for t in tasks])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    peak(), peak()
    before = peak()
    for _ in range(3):
        after = peak()
    assert after - before < 30      # MiB; 1,000 episodes: tests/bench_agentdojo.py


# ---- training ----------------------------------------------------------------------------------------------------------------


class Driven(AgentDojo):
    """Puts a call before whatever an untrained model says, so that it has tool results to read; what holds an "e" is cut off
    in the middle of a call, so that rewards vary."""

    def start(self, task):
        episode = super().start(task)
        step = episode.step
        episode.step = lambda reply: step(scripted.call("get_balance", {}) + (OPEN if reply.count("e") % 2 else "") + reply)
        return episode


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=2, initializer_range=0.2))
    folder = tmp_path_factory.mktemp("long") / "model"
    policy.save(model, AutoTokenizer.from_pretrained(policy._embedded_model()), folder)
    return folder


def test_it_trains_and_resumes_through_the_real_loop(tmp_path, long_tiny):
    def run(name, *arguments):
        assert train.main([*arguments, f"log.dir={tmp_path}", f"log.name={name}", "train.threads=1"]) == 0
        return [{k: v for k, v in row.items() if not k.startswith(VARIES)}
                for row in read_jsonl(tmp_path / name / "metrics.jsonl")]

    new = ["--preset", "agentdojo_tiny", f"model.name={long_tiny}", "env.name=tests.test_agentdojo:Driven",
           "model.dtype=float32", "sampler.max_new_tokens=6", "eval.split=", "sampler.dtype=float32"]
    whole = run("whole", *new)
    first = run("parts", *new, "train.steps=1")
    rest = run("parts", "--resume", "train.steps=3")
    assert whole[:1] == first and whole == rest and [row["step"] for row in whole] == [1, 2, 3]
    assert all(row["rollouts/errors"] == 0 and row["env/turns"] > 1 for row in whole)
    updated = [row for row in whole if "logprob_diff/max" in row]
    assert updated and all(row["logprob_diff/max"] < 0.01 and row["grad_norm"] > 0 for row in updated)
    rollouts = read_jsonl(next((tmp_path / "whole" / "rollouts").glob("*.jsonl")))
    assert {r["finish_reason"] for r in rollouts} <= {"stop", "length"} and any(len(r["replies"]) == 3 for r in rollouts)


# ---- what people see ---------------------------------------------------------------------------------------------------------


def test_a_transcript_shows_everything_escaped_with_the_injection_marked(dojo):
    task = dojo.task("workspace:user_task_26:injection_task_3:important_instructions")
    (r,) = scripted.play(dojo, [task], [[*scripted.ground_truth(dojo, task)[:-1], "<script>alert(1)</script>"]])
    page = dojo.transcript(r.episode)
    assert "<script>" not in page and "&lt;script&gt;" in page and task.messages[1]["content"].split("'")[0] in page
    marked = page.partition("<mark>")[2].partition("</mark>")[0]
    assert marked.startswith("INFORMATION") and marked.endswith("INFORMATION") and "lily.white@gmail.com" in marked
    clean = scripted.play(dojo, [dojo.task("banking:user_task_1:clean")], [["hi"]])[0].episode
    assert "<mark>" not in dojo.transcript(clean)


def test_measures_count_each_episode_where_it_belongs(dojo):
    def sample(id, utility, success, exposed, error=None):
        return {"id": id, "sample": 0, "replies": [], "rewards": {}, "error": error, "metrics": {
            "utility": utility, "attack_success": success, "exposed": exposed, "turns": 2, "tool_errors": 1, "parse_errors": 0}}

    def found(*args, **kw):
        return {k: v for k, v in dojo.measures(sample(*args, **kw)).items() if v is not None}

    clean = found("banking:user_task_0:clean", True, None, False)
    assert clean == {"utility": 1.0, "utility / banking": 1.0, "turns": 2.0, "with tool errors": 1.0, "with parse errors": 0.0}
    hit = found(ATTACKED, True, True, True)
    assert hit["utility under attack"] == hit["attack success"] == hit["attack success (exposed) / banking"] == 1.0
    assert hit["useful and safe"] == hit["useful and safe / important_instructions"] == 0.0 and "utility" not in hit
    blind = found(ATTACKED, True, False, False)
    assert blind["useful and safe"] == 1.0 and blind["exposed"] == 0.0 and not [k for k in blind if "(exposed)" in k]
    assert found(ATTACKED, None, None, False, error="a checker raised") == {}


@pytest.mark.parametrize("policy, line", [("ground_truth", "utility under attack"), ("garbler", "with parse errors")])
def test_the_environment_can_be_seen_without_a_model(tmp_path, policy, line):
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "envs.agentdojo", *arguments], cwd=ROOT, capture_output=True, text=True,
                              timeout=300)

    done = run("--policy", policy, "--suites", "slack,banking", "--limit", "12", "--out", str(tmp_path))
    assert done.returncode == 0 and line in done.stdout, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.html"))) == 12
    wrong = run("--suites", "bank")
    assert wrong.returncode == 2 and "banking" in wrong.stderr and "Traceback" not in wrong.stderr


def test_agentdojo_is_imported_lightly_and_others_can_import_the_rest():
    code = ("import sys, yaml; before = yaml.dump({'a': 'b'})\n"
            "from envs.agentdojo import AgentDojo; AgentDojo(suites=['banking'])\n"
            "assert not {'openai', 'anthropic', 'cohere', 'langchain'} & set(sys.modules)\n"
            "assert yaml.dump({'a': 'b'}) == before\n"
            "from agentdojo.agent_pipeline import ToolsExecutor; from envs.agentdojo import _library\n"
            "assert ToolsExecutor is _library().ToolsExecutor\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_same_calls_give_the_same_text_on_any_day(dojo):
    calls = (scripted.call("create_file", {"filename": "a", "content": "b"}),
             scripted.call("send_email", {"recipients": ["a@b.com"], "subject": "s", "body": "b"}))
    _, texts = send(dojo, "workspace:user_task_0:clean", *calls)
    assert "2026-01-01" in texts[0][0]["content"] and "2026-01-01" in texts[1][0]["content"]
    import datetime

    assert all(module.datetime is datetime for module in _library().clocks)     # and the modules are as they were


def test_replies_on_disk_can_be_scored_again(by_mode):
    for kept in KEPT[:8]:
        env = by_mode[kept["malformed"]]
        r = replay(env, env.task(kept["id"]), 0, kept["replies"])
        score(env, [r])
        assert {k: r.score.metrics[k] for k in kept["metrics"]} == kept["metrics"]
