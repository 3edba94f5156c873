"""Tool calls in the Hermes format, <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Qwen, Hermes and others): read
from a reply, lenient as text and strict as data; and tools described in it, for chat templates that know none."""

import json
import re

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PART = re.compile(rf"<think>.*?(?:</think>|\Z)|{OPEN}", re.DOTALL)
HEAD = re.compile(r"\s*(?:```\w*\s*)?")
TAIL = re.compile(rf"\s*(?:```\s*)?{CLOSE}")


def _no_constant(word: str):
    raise ValueError(f"{word} is not JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)       # raw line breaks in strings are let through


def parse(reply: str) -> tuple[str, list[tuple[str, dict] | str]]:
    """(the text outside of tool calls and thoughts, the calls in order). A call is (name, arguments), or a sentence that says
    why it cannot be read.

    Lenient: white space, code fences around the object, raw line breaks in strings, a last tag that is not closed,
    "parameters" for "arguments", arguments as a string that holds the object. Strict: one JSON object with a string as its
    name and an object as its arguments. Thoughts, <think>...</think>, are skipped; so is what stands before a lone
    </think>, since some templates open the block in the prompt.
    """
    head, closed, rest = reply.partition("</think>")
    if closed and "<think>" not in head and OPEN not in head:
        reply = rest
    text, calls, at = "", [], 0
    while part := PART.search(reply, at):
        text += reply[at : part.start()]
        at = part.end()
        if part.group() == OPEN:
            call, at = _call(reply, at)
            calls.append(call)
    return (text + reply[at:]).strip(), calls


def _call(reply: str, start: int) -> tuple[tuple[str, dict] | str, int]:
    """The call whose block begins at `start`, and where the block ends."""
    def closed(at: int) -> int:                             # where a closing tag comes before the next opening one, else -1
        close, again = reply.find(CLOSE, at), reply.find(OPEN, at)
        return -1 if 0 <= again < close else close

    try:
        data, end = DECODER.raw_decode(reply, HEAD.match(reply, start).end())
        call = _checked(data)
        if tail := TAIL.match(reply, end):
            return call, tail.end()
        if closed(end) < 0:                                 # left open: the block ends with its object
            return call, end
        raise ValueError("something follows the object")
    except (ValueError, RecursionError) as e:
        close, again = closed(start), reply.find(OPEN, start)
        return str(e) or type(e).__name__, close + len(CLOSE) if close >= 0 else again if again >= 0 else len(reply)


def _checked(data) -> tuple[str, dict]:
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    arguments = data["arguments"] if "arguments" in data else data.get("parameters")
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(data.get("name"), str):
        raise ValueError('"name" must be a string')
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    return data["name"], arguments


def as_text(messages: list[dict[str, str]], tools: list[dict] | None) -> list[dict[str, str]]:
    """Messages without tools and without the role "tool": the tools stand in the system message, results in the user's."""
    out: list[dict[str, str]] = []
    if tools:
        schemas = "\n".join(json.dumps(tool) for tool in tools)
        out = [{"role": "system", "content": (
            "You can call tools. Their JSON schemas, one a line:\n"
            f"<tools>\n{schemas}\n</tools>\n"
            "To call a tool, write its name and its arguments as one JSON object between these tags, then wait for the "
            f'result:\n{OPEN}\n{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}\n{CLOSE}')}]
    previous = None
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role == "system" and out and previous is None:
            out[0]["content"] = f"{content}\n\n{out[0]['content']}"
        elif role == "tool" == previous:                    # results of one message stand in one turn
            out[-1]["content"] += f"\n{content}"
        else:
            out.append({"role": "user" if role == "tool" else role, "content": content})
        previous = role
    return out
