"""The four tool rewards: what each reply earns, ToolRL's totals, and that nothing is ever raised."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.rows import load
from rewards import tool

DATA = Path(os.environ.get("CORRGRPO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data") / "rlla"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set CORRGRPO_DATA")


def reply(*calls, think="<think> I call. </think>\n", after=""):
    lines = "\n".join(c if isinstance(c, str) else json.dumps({"name": c[0], "parameters": c[1]}) for c in calls)
    return f"{think}<tool_call>\n{lines}\n</tool_call>{after}"


def shares(text, reference):
    r = tool.score(text, reference)
    return r["name_score"], r["parameter_score"], r["value_score"], r["all_exact"]


WEATHER, TIMER = ("weather", {"city": "Oslo", "days": 3}), ("timer", {"minutes": 10})
DIRECT = "<think> Nothing to call. </think>\n<response> Hello. </response>"


def test_scales_of_right_wrong_and_unparsable_replies():
    right, lowest = tool.score(reply(WEATHER), reply(WEATHER)), tool.score("no call", reply(WEATHER))
    assert [right[name] for name in tool.NAMES] == [0.5, 1.0, 1.5, 1.0] and right["all_exact"] is True
    assert [lowest[name] for name in tool.NAMES] == [-0.5, -1.0, -1.5, 0.0] and lowest["all_exact"] is False
    half = tool.score(reply(("weather", {"city": "Oslo", "hours": 3})), reply(WEATHER))
    assert [half[name] for name in tool.NAMES] == [0.5, pytest.approx(2 / 3 - 1), 0.0, 1.0]


@pytest.mark.parametrize("found, expected", [
    ([TIMER, WEATHER], (1, 1, 1, True)),                                            # in any order
    ([WEATHER], (1 / 2, 1 / 2, 2 / 3, False)),                                      # one is missing
    ([WEATHER, TIMER, TIMER], (2 / 3, 1, 1, False)),                                # one too many
    ([WEATHER, TIMER, '{"name": "other"}'], (2 / 3, 1, 1, False)),                  # nobody looks at its parameters
    ([WEATHER, ("clock", {"minutes": 10})], (1 / 3, 1 / 2, 2 / 3, False)),          # the wrong name: its arguments don't count
    ([("weather", {"city": "Oslo", "days": "3"}), TIMER], (1, 1, 2 / 3, False)),    # text is no number
    ([("weather", {"city": "Oslo", "days": 3.0}), TIMER], (1, 1, 1, True)),         # JSON has one kind of number
    ([("weather", {"city": "Oslo", "days": True}), TIMER], (1, 1, 2 / 3, False)),
    ([("weather", {"city": "Oslo", "days": 3, "units": "C"}), TIMER], (1, (2 / 3 + 1) / 2, 1, False)),
])
def test_matching(found, expected):
    assert shares(reply(*found), reply(WEATHER, TIMER)) == pytest.approx(expected)


def test_each_reference_call_takes_the_unused_call_with_most_in_common():
    wanted = [("f", {"a": 1, "b": 2}), ("f", {"a": 1, "b": 3})]
    assert shares(reply(*reversed(wanted)), reply(*wanted)) == (1, 1, 1, True)
    assert shares(reply(wanted[0], ("f", {"a": 9, "b": 9})), reply(*wanted)) == (1, 1, 0.5, False)
    assert shares(reply(wanted[0], wanted[0]), reply(*wanted)) == (1, 1, 0.75, False)


def test_nothing_to_match_counts_as_matched():
    assert shares(reply(("now", {})), reply(("now", {}))) == (1, 1, 1, True)
    assert shares(reply(("now", {"zone": "UTC"})), reply(("now", {}))) == (1, 0, 1, False)
    assert shares(reply(("later", {})), reply(("now", {}))) == (0, 0, 1, False)


@pytest.mark.parametrize("value, other, equal", [
    (1, True, False), (0, False, False), (1, "1", False), (True, "true", False), (None, "null", False), (1, 1.0, True),
    ("</think>", "</think>", True),
    ([1, [True]], [1, [1]], False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ([1, 2], [2, 1], False), ("a", "A", False),
])
def test_values_compare_by_json_type(value, other, equal):
    assert tool.score(reply(("f", {"x": value})), reply(("f", {"x": other})))["all_exact"] is equal


@pytest.mark.parametrize("text", [
    "", "<think> </think>", reply('{"name": "weather"}'), reply('{"name": "weather", "arguments": {}}'), reply(WEATHER)[:-5],
    reply('{"name": "weather", "parameters": {"city": "Oslo", "days": 3}'), reply('[{"name": "weather", "parameters": {}}]'),
    reply(WEATHER, "and a word"), reply('{"name": 3, "parameters": {}}'), reply('{"name": "weather", "parameters": []}'),
    "<think> " + reply(WEATHER, think="") + " </think>",                            # thought of, not called
])
def test_a_reply_without_readable_calls_earns_the_least(text):
    assert [tool.score(text, reply(WEATHER))[name] for name in ("name", "parameter", "value")] == [-0.5, -1.0, -1.5]


@pytest.mark.parametrize("after", ["\n</think>", "\n<think> b </think>\n<response> c </response>",
                                   "\n<think> b </think>\n" + reply(TIMER, think="")])
def test_the_first_block_after_the_thoughts_counts_whatever_follows(after):
    assert tool.score(reply(WEATHER) + after, reply(WEATHER))["all_exact"]
    quoting = ("weather", {"city": "</think> <response>", "days": 3})
    assert tool.score(reply(quoting) + after, reply(quoting))["all_exact"]


def test_what_is_nested_too_deeply_is_no_error_and_not_the_same():
    for depth in range(900, 1100, 3):
        call = {"name": "f", "parameters": {"a": json.loads("[" * 300 + "]" * 300)}}
        for _ in range(depth - 300):
            call["parameters"]["a"] = [call["parameters"]["a"]]
        assert not tool.same(call, {"name": "f", "parameters": {}})


@pytest.mark.parametrize("text, reference, formatted", [
    (reply(WEATHER), reply(TIMER), 1), (reply(WEATHER, think="<think>a</think>   \n\n"), reply(WEATHER), 1),
    (reply(WEATHER, think="<think>a</think>"), reply(WEATHER), 1), (reply(WEATHER) + "\n", reply(WEATHER), 1),
    (reply("broken"), reply(WEATHER), 1),                                           # the form is there, the calls are not
    (reply(WEATHER, think=""), reply(WEATHER), 0), (reply(WEATHER, think="a</think>"), reply(WEATHER), 0),
    (reply(WEATHER) + " done", reply(WEATHER), 0), ("Well. " + reply(WEATHER), reply(WEATHER), 0),
    (reply(WEATHER) + reply(TIMER, think=""), reply(WEATHER, TIMER), 0), (reply(WEATHER)[:-3], reply(WEATHER), 0),
    (reply(WEATHER, after="\n<response> a </response>"), reply(WEATHER), 0), (DIRECT, reply(WEATHER), 0),
    (reply(WEATHER, after="\n<response> a </response>"), reply(TIMER, after="<response> b </response>"), 1),
    (DIRECT, DIRECT, 1), (reply(WEATHER), DIRECT, 0), ("Hello.", DIRECT, 0), (DIRECT + DIRECT, DIRECT, 0),
])
def test_format(text, reference, formatted):
    assert tool.score(text, reference)["format"] == formatted


def test_a_row_answered_directly_has_only_a_format():
    for text, silent in ((DIRECT, True), (reply(WEATHER), False), ("", True)):
        r = tool.score(text, DIRECT)
        assert (r["name"], r["parameter"], r["value"], r["all_exact"], r["calls"]) == (0, 0, 0, silent, 0)


def test_an_unusable_reference_is_no_score():
    for reference in (None, 3, "", "<think> a </think>", reply("broken"), [{"name": "f"}], reply(WEATHER)[:-5]):
        assert "reference" in tool.score(reply(WEATHER), reference)["error"]
    assert tool.score(reply(WEATHER), [{"name": "weather", "parameters": WEATHER[1]}])["all_exact"]


def test_damage_is_an_open_bracket_and_no_smiley():
    assert "days" in tool.damage(reply(("f", {"days": '["Mon"', "city": "Oslo"})))
    assert "cut off" in tool.damage(reply(("f", {"where": [{"deep": '{"a": 1'}]})))
    assert tool.damage(reply("broken")) and tool.damage("text")
    for value in ("(a", ":-)", "[sic] fine :)", "[0, 5)", "{a", '["Mon"]', '{"a": "}"}', "a) one, b) two", ["["[:0]]):
        assert tool.damage(reply(("f", {"x": value}))) is None, value


def toolrl(wanted, found):
    """ToolRL's correctness in [-3, 3], written down from its definition: names as multisets, then for each reference call the
    best unused call by shared over united keys plus the number of equal values."""
    def overlap(a, b):
        a, b = Counter(list(a)), Counter(list(b))
        return sum((a & b).values()) / sum((a | b).values()) if a or b else 1.0

    total, most, used = overlap([n for n, _ in wanted], [n for n, _ in found]), 1.0, set()
    for name, given_ in wanted:
        most += 1 + len(given_)
        scored = [(overlap(given_, theirs) + sum(theirs.get(k, object()) == v for k, v in given_.items()), -i)
                  for i, (other, theirs) in enumerate(found) if i not in used and other == name]
        best, i = max(scored, default=(0, 0))
        if best > 0:
            used.add(-i)
            total += best
    return 6 * total / most - 3


NAMES_, VALUES = st.sampled_from("fgh"), st.sampled_from(["a", "b", 1, 2])
CALLS = st.lists(st.tuples(NAMES_, st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(CALLS, CALLS)
def test_the_shares_give_toolrls_total(wanted, found):
    r = tool.score(reply(*found), reply(*wanted))
    parts = r["name_score"] + r["calls"] * r["parameter_score"] + r["parameters"] * r["value_score"]
    assert 6 * parts / (1 + r["calls"] + r["parameters"]) - 3 == pytest.approx(toolrl(wanted, found))
    same = Counter((n, frozenset(g.items())) for n, g in wanted) == Counter((n, frozenset(g.items())) for n, g in found)
    assert r["all_exact"] is same


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) |
                    st.dictionaries(st.text() | st.sampled_from(["name", "parameters"]), inner), max_leaves=12)
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "\n", "{", '"', "NaN",
                                   '{"name": "f", "parameters": {}}', "[" * 2000, "1e999", "9" * 5000, "\ud800"]) | st.text())


@settings(max_examples=500, deadline=None)
@given(st.text() | PIECES.map("".join), JSON | PIECES.map("".join) | CALLS.map(lambda calls: reply(*calls)))
def test_nothing_is_ever_raised(text, reference):
    r = tool.score(text, reference)
    assert -0.5 <= r["name"] <= 0.5 and -1 <= r["parameter"] <= 1 and -1.5 <= r["value"] <= 1.5 and r["format"] in (0, 1)


@needs_data
def test_every_published_reference_is_exact_and_the_damaged_are_known():
    rows, clean = ([row for _, row in load(str(DATA / f"{name}.jsonl.gz"), "")[1]] for name in ("rlla_test", "bfcl_as_rlla"))
    found = [tool.score(row["ground_truth"], row["ground_truth"]) for row in rows]
    assert len(rows) == 80 and all(r["all_exact"] and r["format"] == 1 for r in found)
    assert sum(r["calls"] > 0 for r in found) == 71
    assert [row["index"] for row in rows if tool.damage(row["ground_truth"])] == [9, 25, 35, 36, 44]
    assert not any(tool.damage(row["ground_truth"]) for row in clean)
