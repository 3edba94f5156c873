"""Four rewards for a reply that should call tools: name, parameter, value, format.

    <think> thoughts </think>
    <tool_call>
    {"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}
    </tool_call>
    <response> text </response>            instead of the calls, or after them

The reply format and the matching are ToolRL's (Qian et al. 2025, arXiv 2504.13958; qiancheng0/ToolRL, rlla.py), the scales
those of the CorrGRPO authors' release. Reconstructed here: values compare by JSON type (ToolRL's Python `==` holds 1 and true
equal); a block counts only after the thoughts; a reference that cannot be read is an error.
"""

import json
import re
from collections import Counter
from typing import Any

NAMES = ("name", "parameter", "value", "format")
SCALES = {"name": 0.5, "parameter": 1.0, "value": 1.5}     # a share s in [0, 1] becomes (2 s - 1) * scale

_BLOCKS = {"think": r"<think>.*</think>", "tool_call": r"<tool_call>\n.*\n</tool_call>", "response": r"<response>.*</response>"}

_END = re.compile(r"</think>\s*<(?:tool_call|response)>")

Call = tuple[str, dict[str, str]]                           # name, {parameter: its value as canonical JSON}


def score(reply: str, reference: Any) -> dict[str, Any]:
    """Score a reply against a reference: a reply as above, or the calls themselves as a list of {"name", "parameters"}.

    name_score       shared over united multisets of names
    parameter_score  each reference call is paired, in order, with the unused predicted call of its name that has most in common
                     (key overlap plus equal values); mean over reference calls of shared over united keys, 0 where unpaired
    value_score      equal values under the same key, over all reference parameters; 1 if there are none
    name, parameter, value   these shares on the scales [-0.5, 0.5], [-1, 1], [-1.5, 1.5]; all at their lowest where the reply
                     has no block of calls or a line of it is no {"name": text, "parameters": object}; 0 where the
                     reference calls nothing
    format           1.0 if the reply is the blocks that the reference has, in order, white space between them, tool_call and
                     response once; else 0.0. What the thoughts say is free, as in ToolRL, a second <think> included
    all_exact        the calls are the reference's, in any order; where it calls nothing: the reply calls nothing
    calls, parameters    how many the reference has; ToolRL's correctness, in [-3, 3], is
                     6 * (name_score + calls * parameter_score + parameters * value_score) / (1 + calls + parameters) - 3
    error            None, or why the reference cannot be used: no score. Nothing is ever raised
    """
    reply = reply if isinstance(reply, str) else ""
    try:
        wanted, blocks = _reference(reference)
    except (TypeError, ValueError, RecursionError) as problem:
        return _result(0, 0, 0, False, [], False) | dict.fromkeys(SCALES, 0.0) | {"error": f"reference: {problem}"}
    formatted = _formatted(reply, blocks)
    if not wanted:
        silent = "<tool_call>" not in answer(reply)
        return _result(silent, silent, silent, formatted, [], silent) | dict.fromkeys(SCALES, 0.0)
    try:
        found = parse(_block(reply), {name for name, _ in wanted})
    except (ValueError, RecursionError):
        return _result(0, 0, 0, formatted, wanted, False)
    names = _overlap(Counter(name for name, _ in wanted), Counter(name for name, _ in found))
    keys, values = _paired(wanted, found)
    parameters = sum(len(given) for _, given in wanted)
    shares = names, keys / len(wanted), values / parameters if parameters else 1.0
    return _result(*shares, formatted, wanted, all(share == 1 for share in shares))


def parse(block: str, names: set[str] | None = None) -> list[Call]:
    """The calls in the text between the tags, one JSON object a line. ValueError or RecursionError if a line is none. With
    `names`, a call of another name may lack parameters, since nobody will look at them."""
    return [_call(json.loads(line, parse_float=_number), names) for line in block.strip().split("\n")]


def same(call: Any, reference: Any) -> bool:
    """Whether two {"name", "parameters"} are equal by JSON type; what is nested too deeply to tell is not."""
    try:
        (first,), (second,) = (_reference([c])[0] for c in (call, reference))
    except RecursionError:
        return False
    return first == second


def damage(reference: str) -> str | None:
    """What is wrong with a reference reply, if anything: unreadable, or a bracket left open by a string that was cut off."""
    try:
        for name, given in _reference(reference)[0]:
            for key, value in given.items():
                if not _balanced(key) or any(map(_open, _texts(value))):
                    return f"{name}: the parameter {key!r} is cut off: {value[:60]}"
    except (ValueError, RecursionError) as problem:
        return str(problem)
    return None


def _result(names: float, keys: float, values: float, formatted: bool, wanted: list[Call], exact: bool) -> dict[str, Any]:
    shares = {"name": float(names), "parameter": float(keys), "value": float(values)}
    return {**{name: (2 * share - 1) * SCALES[name] for name, share in shares.items()}, "format": float(formatted),
            **{f"{name}_score": share for name, share in shares.items()}, "all_exact": bool(exact),
            "calls": len(wanted), "parameters": sum(len(given) for _, given in wanted), "error": None}


def _reference(reference: Any) -> tuple[list[Call], tuple[str, ...]]:
    """The calls, and which blocks a reply to it has."""
    if isinstance(reference, list | dict):
        calls = [_call(json.loads(json.dumps(call), parse_float=_number))
                 for call in (reference if isinstance(reference, list) else [reference])]
        return calls, ("think", "tool_call" if calls else "response")
    if not isinstance(reference, str):
        raise ValueError(f"expected a reply or a list of calls, got {type(reference).__name__}")
    blocks = tuple(name for name in _BLOCKS if name == "think" or f"<{name}>" in answer(reference))
    if blocks == ("think",):
        raise ValueError("there is neither a <tool_call> nor a <response> in it")
    return parse(_block(reference)) if "tool_call" in blocks else [], blocks


def answer(reply: str) -> str:
    """What follows the thoughts: they end where a block opens, or else at their last tag."""
    end = _END.search(reply)
    return reply[end.start() + len("</think>"):] if end else reply.rsplit("</think>", 1)[-1]


def _block(reply: str) -> str:
    _, opened, rest = answer(reply).partition("<tool_call>")
    block, closed, _ = rest.partition("</tool_call>")
    if not (opened and closed):
        raise ValueError("no whole <tool_call> block")
    return block


def _formatted(reply: str, blocks: tuple[str, ...]) -> bool:
    once = all(reply.count(f"<{name}>") == reply.count(f"</{name}>") == 1 for name in blocks[1:])
    return once and re.fullmatch(r"\s*".join(_BLOCKS[name] for name in blocks), reply.strip(), re.DOTALL) is not None


def _call(data: Any, names: set[str] | None = None) -> Call:
    if names is not None and isinstance(data, dict) and isinstance(data.get("name"), str) and data["name"] not in names:
        return data["name"], {}
    if not (isinstance(data, dict) and isinstance(data.get("name"), str) and isinstance(data.get("parameters"), dict)):
        raise ValueError(f"no call with a name and parameters: {str(data)[:60]}")
    return data["name"], {key: json.dumps(value, sort_keys=True) for key, value in data["parameters"].items()}


def _number(text: str) -> int | float:
    """JSON has one kind of number: 1.0 is 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _overlap(first: Counter, second: Counter) -> float:
    return (first & second).total() / (first | second).total() if first or second else 1.0


def _paired(wanted: list[Call], found: list[Call]) -> tuple[float, int]:
    """Sum over reference calls of their pair's key overlap, and the number of equal values."""
    unused, keys, values = list(found), 0.0, 0
    for name, given in wanted:
        best, choice = (0.0, 0), None
        for i, (other, theirs) in enumerate(unused):
            if other == name:
                common = _overlap(Counter(given.keys()), Counter(theirs.keys())), len(given.items() & theirs.items())
                if sum(common) > sum(best):
                    best, choice = common, i
        if choice is not None:
            del unused[choice]
        keys, values = keys + best[0], values + best[1]
    return keys, values


def _texts(value: str) -> list[str]:
    """Every string in a JSON text."""
    found, todo = [], [json.loads(value)]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict | list):
            todo += item.values() if isinstance(item, dict) else item
    return found


def _open(text: str) -> bool:
    """Whether a text that looks like JSON has more brackets that open than close, outside of double quotes."""
    outside = re.sub(r'"(\\.|[^"\\])*"', "", text)
    return re.match(r'\s*[\[{]\s*["\[{\d]', text) is not None and (
        sum(outside.count(c) for c in "[{(") > sum(outside.count(c) for c in "]})"))


def _balanced(text: str) -> bool:
    """Whether brackets close in order, outside of double quotes."""
    closing, open_ = {")": "(", "]": "[", "}": "{"}, []
    for c in re.sub(r'"(\\.|[^"\\])*"', "", text):
        if c in "([{":
            open_.append(c)
        elif c in closing and (not open_ or open_.pop() != closing[c]):
            return False
    return not open_
