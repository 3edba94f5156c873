"""API-Bank's two judges: the static one on ToolRL's files, the execution judge on a stand-in for upstream's checkout that has
the parts of its interface which the judge uses."""

import json
import os
from pathlib import Path

import pytest

import envs
from envs.apibank import APIBank

DATA = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set CORRGRPO_DATA")


def verdicts(env, tasks, replies):
    episodes = [env.start(task) for task in tasks]
    for e, reply in zip(episodes, replies, strict=True):
        assert e.step(reply) == []
    return env.score(episodes)


def call(api, block="<tool_call>\n{}\n</tool_call>", **parameters):
    return block.format(json.dumps({"name": api, "parameters": parameters}))


@needs_data
def test_the_static_judge_accepts_every_reference_and_names_the_impossible_rows(monkeypatch, capsys):
    monkeypatch.setenv("CORRGRPO_DATA", str(DATA))
    env = APIBank()
    tasks = env.tasks()
    said = capsys.readouterr().out
    assert "[6, 13, 14, 19, 25, 54], the year 2023 in 12 rows" in said and "rows none, the year 2023 in 33 rows" in said
    scores = verdicts(env, tasks, [env.reference(task) for task in tasks])
    assert len(scores) == 399 + 67 + 131 and all(s.rewards["correct"] == 1 and s.error is None for s in scores)
    assert sum(s.metrics["reachable"] for s in scores) == 597 - 6
    measured = env.measures({"rewards": scores[0].rewards, "metrics": scores[0].metrics})
    assert measured == {"v1 (static)": 1.0, "v1 ceiling (static)": 1.0}
    assert len({task.id for task in tasks}) == len(tasks)


@needs_data
def test_the_static_judge_takes_what_follows_the_last_tag_and_compares_exactly(monkeypatch):
    monkeypatch.setenv("CORRGRPO_DATA", str(DATA))
    env = APIBank()
    task = env.tasks()[0]
    name, right = task.data["name"], task.data["parameters"]
    replies = {call(name, **right): 1, call("X", **right): 0, call(name): 0, call(name, **right, more="1"): 0, "": 0,
               call(name, **(right | {"appointment_id": 34567890})): 0, call(name, **right)[:-12]: 1,
               call(name) + call(name, **right): 1, call(name, **right) + call(name): 0,
               call(name, "<tool_call>\nbroken\n{}\n</tool_call>", **right): 1, call(name, "{}", **right): 1}
    scores = verdicts(env, [task] * len(replies), replies)
    assert [s.rewards["correct"] for s in scores] == list(replies.values())


MANAGER = """
import importlib, json, os
class ToolManager:
    def __init__(self, apis_dir="./apis"):
        self.classes, self.tools = {}, {}
        for file in sorted(os.listdir(apis_dir)):
            module = importlib.import_module("apis." + file[:-3])
            self.classes |= {k: v for k, v in vars(module).items() if isinstance(v, type) and hasattr(v, "input_parameters")}
        with open("./init_database/Users.json") as f:
            self.database = json.load(f)
    def get_api_by_name(self, name):
        return {"name": name, "class": self.classes[name]}
    def init_tool(self, name):
        if name not in self.tools:
            self.tools[name] = self.classes[name](dict(self.database))
        return self.tools[name]
    def api_call(self, name, **parameters):
        assert set(parameters) <= set(self.classes[name].input_parameters), "invalid parameter name"
        return self.init_tool(name).call(**parameters)
"""
APIS = """
import os, socket, sys, time
from sentence_transformers import SentenceTransformer, util
from googletrans import Translator
class Tool:
    def __init__(self, database): self.database = database
    def check_api_call_correctness(self, response, groundtruth): return response["output"] == groundtruth["output"]
class GetToken(Tool):
    description, input_parameters = "Get a token.", {"username": {"type": "str", "description": "Who."}}
    def call(self, username):
        print("noise on stdout"); print("and on stderr", file=sys.stderr)
        return {"output": self.database[username]}
class Count(Tool):
    description, input_parameters = "Count the calls.", {}
    calls = 0
    def call(self):
        self.calls += 1
        return {"output": self.calls}
class ToolSearcher(Tool):
    def __init__(self, database): self.model = SentenceTransformer("model")
    description, input_parameters = "Search tools.", {"keywords": {"type": "str", "description": "What for."}}
    def call(self, keywords): return {"output": self.model.encode(keywords)}
class Odd(Tool):
    description, input_parameters = "Does harm.", {"kind": {"type": "str", "description": "Which."}}
    def call(self, kind):
        if kind == "hang": time.sleep(1000)
        if kind == "exit": os._exit(0)
        if kind == "flood": print("x" * 10**7)
        if kind == "network": socket.create_connection(("127.0.0.1", 9), timeout=1)
        if kind == "write": open(@OUTSIDE@, "w").write("out")
        if kind == "read": return {"output": open(@OUTSIDE@).read()}
        return {"output": kind}
"""


def turn(name, output, **parameters):
    return {"role": "API", "api_name": name, "param_dict": parameters, "result": {"api_name": name, "output": output}}


@pytest.fixture
def checkout(tmp_path):
    root, outside = tmp_path / "DAMO" / "api-bank", tmp_path / "outside"
    for folder in ("apis", "init_database", "lv1-lv2-samples/level-1-given-desc", "lv1-lv2-samples/level-2-toolsearcher"):
        (root / folder).mkdir(parents=True)
    outside.write_text("secret")
    (root / "tool_manager.py").write_text(MANAGER)
    (root / "apis" / "all.py").write_text(APIS.replace("@OUTSIDE@", repr(str(outside))))
    (root / "init_database" / "Users.json").write_text('{"ann": "t-1"}')
    user, ai = {"role": "User", "text": "I am ann."}, {"role": "AI", "text": "One moment."}
    found = {"name": "Count", "description": "Count the calls.", "input_parameters": {}}
    for file, turns in {
        "level-1-given-desc/GetToken-Count-level-1-1.jsonl": [user, turn("GetToken", "t-1", username="ann"), ai,
                                                              turn("Count", 1)],
        "level-2-toolsearcher/Count-level-2-1.jsonl": [user, turn("ToolSearcher", found, keywords="count"), turn("Count", 1)],
    }.items():
        (root / "lv1-lv2-samples" / file).write_text("".join(json.dumps(t) + "\n" for t in turns))
    return root


def test_the_execution_judge_runs_upstreams_checker_in_a_process_of_its_own(checkout, capsys):
    env = APIBank(judge="execution", root=str(checkout.parent), timeout=3)
    tasks = env.tasks()
    assert [t.id.split(":")[0] for t in tasks] == ["v1", "v1", "v2", "v2"]
    assert "googletrans, sentence_transformers not installed" in capsys.readouterr().out
    first, second, _, found = (t.messages for t in tasks)
    assert "Name: GetToken\nDescription: Get a token." in first[0]["content"] and "Name: Count" in first[0]["content"]
    assert '{"name": "GetToken", "parameters": {"username": "ann"}}' in second[1]["content"]
    assert '<obs> "t-1" </obs>\n<response> One moment. </response>' in second[1]["content"] and "t-1" not in first[1]["content"]
    assert "Name: Count" in found[0]["content"]
    assert 'Description: Search tools.\nParameters: {"keywords"' in found[0]["content"]     # though it cannot start here

    scores = verdicts(env, tasks, [env.reference(t) for t in tasks])
    assert [s.rewards["correct"] for s in scores] == [1, 1, 0, 1] == [s.metrics["reachable"] for s in scores]
    assert "sentence_transformers.SentenceTransformer is not installed" in scores[2].metrics["detail"]
    assert env.measures(vars(scores[2]))["v2 ceiling (execution)"] == 0

    replies = [call("GetToken", username="bob"), call("GetToken", name="ann"), call("Count"), call("Nothing"), "none",
               call("GetToken")]
    got = verdicts(env, [tasks[0]] * len(replies), replies)
    assert [s.rewards["correct"] for s in got] == [0] * len(replies) and all(s.error is None for s in got)
    two = call("GetToken", username="bob") + call("GetToken", username="ann")
    both = call("GetToken", '<tool_call>\n{}\n{{"name": "Count", "parameters": {{}}}}\n</tool_call>', username="ann")
    right, wrong = (f"<think>a</think>\n{call('GetToken', username=who)}" for who in ("ann", "bob"))
    goes_on = [right + "<obs> 1 </obs>" + wrong, wrong + right, right + "<think>b</think><response>done</response>"]
    got = verdicts(env, [tasks[0]] * 5, [two, both, *goes_on])
    assert [s.rewards["correct"] for s in got] == [0, 1, 1, 0, 1]       # the first call counts
    env.checkout.close()


def test_what_a_call_does_to_upstreams_process_costs_that_call_alone(checkout, tmp_path):
    env = APIBank(judge="execution", root=str(checkout), timeout=2)
    rows = tmp_path / "dialogues.jsonl"
    kinds = ["hang", "exit", "flood", "network", "write", "read", "fine"]
    rows.write_text("".join(json.dumps({"split": "level-3", "file": f"Odd-{k}.jsonl", "turns": [turn("Odd", k, kind=k)]}) + "\n"
                            for k in kinds))
    env.data = str(rows)
    tasks = env.tasks()
    scores = verdicts(env, tasks, [env.reference(t) for t in tasks])
    assert {k: s.rewards["correct"] for k, s in zip(kinds, scores)} == dict.fromkeys(kinds, 0) | {"flood": 1, "fine": 1}
    assert (tmp_path / "outside").read_text() == "secret"
    copy = Path(env.checkout._copy.name)
    env.checkout.close()
    assert not copy.exists()


def test_a_manager_is_fresh_for_each_call_but_one_in_v3(checkout, tmp_path):
    rows = tmp_path / "dialogues.jsonl"
    rows.write_text("".join(json.dumps({"split": split, "file": f"Count-{split}-1.jsonl", "turns": [turn("Count", n)]}) + "\n"
                            for split, n in (("level-1-given-desc", 1), ("level-3", 1), ("level-3", 2), ("level-3", 3))))
    env = APIBank(judge="execution", root=str(checkout), data=str(rows), timeout=2)
    tasks = env.tasks()
    for _ in range(2):
        assert verdicts(env, tasks[:1], [call("Count")])[0].rewards["correct"] == 1
    first, hanging, last = verdicts(env, tasks[1:], [call("Count"), call("Odd", kind="hang"), call("Count")])
    assert (first.rewards["correct"], first.metrics["reachable"]) == (1, 1)     # the gold calls have a manager of their own
    assert (hanging.rewards["correct"], hanging.metrics["reachable"]) == (0, 1)
    assert (last.rewards["correct"], last.metrics["reachable"]) == (0, 1)       # only one call was counted before it
    env.checkout.close()


def test_what_is_missing_is_said_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"env\.root = ''.*DAMO-ConvAI"):
        APIBank(judge="execution")
    with pytest.raises(ValueError, match="static and execution"):
        APIBank(judge="exec")
    with pytest.raises(ValueError, match="there is no file"):
        APIBank(data=str(tmp_path / "level-{level}.json")).tasks()
    (tmp_path / "level-1.json").write_text('[{"system": "a"}]')
    with pytest.raises(ValueError, match=r"level-1\.json, row 1: it needs system, user, answer"):
        APIBank(data=str(tmp_path / "level-{level}.json")).tasks()
    (tmp_path / "level-1.json").write_text('[{"system": null, "user": "", "answer": {"name": "a", "parameters": {}}}]')
    with pytest.raises(ValueError, match=r"level-1\.json, row 1: .*are texts"):
        APIBank(data=str(tmp_path / "level-{level}.json")).tasks()
    (tmp_path / "tool_manager.py").write_text("import no_such_module")
    with pytest.raises(ValueError, match="cannot be used: ModuleNotFoundError"):
        APIBank(judge="execution", root=str(tmp_path)).checkout.describe("a")
    with pytest.raises(ValueError, match="no API turn in a dialogue of level-1-given-desc"):
        APIBank(judge="execution", root=str(tmp_path)).tasks()
    (tmp_path / "rows.json").write_text('[{"split": "level-3", "file": "a", "turns": [{"role": "User"}]}]')
    with pytest.raises(ValueError, match=r"rows\.json, row 1: it needs split, file and turns"):
        APIBank(judge="execution", root=str(tmp_path), data=str(tmp_path / "rows.json")).tasks()
    assert envs.find("apibank") is APIBank
