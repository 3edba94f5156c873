"""LiveCodeBench, code generation (Jain et al. 2024, arXiv 2403.07974; LiveCodeBench/LiveCodeBench), for evaluation only.

A problem either asks for a method of `class Solution` (functional) or for a program that reads and prints (stdin). The code is
the last fenced block. Results are compared by the published rules, outside the program's reach: functional by ==, a tuple
counting as a list; printed lines stripped, equal or equal token by token as decimal numbers. Each test is a run of its own.
"""

import base64
import io
import json
import pickle
import re
import zlib
from typing import Any

import huggingface_hub

from envs import Task, programs, rows
from rewards import code

NEEDED = ("question_title", "question_content", "question_id", "contest_date", "starter_code", "public_test_cases",
          "private_test_cases", "metadata")
HUB = "livecodebench/code_generation_lite"
ADDED = (400, 111, 101, 101, 167, 175)      # problems that releases 1 to 6 added, as published

HEADER = """from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, os, random, re, statistics
import string, sys
sys.setrecursionlimit(50000)
"""
STDIN = HEADER + '''
imported = dict(globals())
def run_program(source, data):
    """What a program prints that finds `data` on its standard input, whichever way it reads."""
    with open("stdin", "w") as f:
        f.write(data)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(os.open("stdout", os.O_RDWR | os.O_CREAT | os.O_TRUNC), 1)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    try:
        exec(compile(source, "<answer>", "exec"), imported | {"__name__": "__main__"})
    except SystemExit:
        pass
    sys.stdout.flush()
    with open("stdout") as f:
        return f.read()
'''
COMPARE = '''
from decimal import Decimal, InvalidOperation
def same_output(printed, expected):
    first, second = ([line.strip() for line in text.strip().split("\\n")] for text in (printed, expected))
    def decimals(line):
        return [Decimal(token) for token in line.split()]
    try:
        return len(first) == len(second) and all(a == b or decimals(a) == decimals(b) for a, b in zip(first, second))
    except InvalidOperation:
        return False
def check(candidate):
    assert same_output(candidate({input!r}), {output!r})
'''
CALL = '''
def check(candidate):
    result = candidate(*{arguments!r})
    assert (list(result) if isinstance(result, tuple) else result) == {output!r}
'''


class LiveCodeBench(programs.Programs):
    def __init__(self, release: str = "v6", data: str = "", after: str = "", before: str = "", timeout: float = 6.0,
                 memory_mb: int = 4096, workers: int = 0):
        """release, as LiveCodeBench names its slices: v6 (the 175 problems that the sixth release added), v4_v6 (added by the
        fourth to the sixth), release_v6 (all 1,055 up to it); its files are test.jsonl, test2.jsonl ... test6.jsonl, under
        livecodebench/ in $CORRGRPO_DATA or on the hub. data: one .jsonl file with rows of that kind instead. after, before:
        contest dates, YYYY-MM-DD, both included. timeout: CPU seconds for one test."""
        slice_ = re.fullmatch(r"(release_)?v([1-6])(?:_v([1-6]))?", release)
        first, last = (1 if slice_[1] else int(slice_[2]), int(slice_[3] or slice_[2])) if slice_ else (1, 0)
        if first > last or (slice_[1] and slice_[3]):
            raise ValueError(f"livecodebench.release = {release!r}: slices are v1 to v6, ranges as v4_v6, and release_v1 to "
                             "release_v6")
        self.release, self.numbers = release, range(first, last + 1)
        for name, date in (("after", after), ("before", before)):
            if date and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
                raise ValueError(f"livecodebench.{name} = {date!r}: a date is YYYY-MM-DD")
        self.data, self.after, self.before = data, after, before
        self.limits, self.notes = {"timeout": timeout, "memory_mb": memory_mb, "workers": workers}, {}

    def tasks(self, split: str = "test") -> list[Task]:
        found = [row for file in ([self.data] if self.data else map(_file, self.numbers))
                 for row in rows.texts(file, split, NEEDED)]
        kept = [row for row in found if self.after <= row["contest_date"][:10] <= (self.before or "9999")]
        dates = [row["contest_date"][:10] for row in kept]
        published = sum(ADDED[n - 1] for n in self.numbers)
        self.notes = {"slice": f"{len(kept)} problems of {self.data or self.release}, {min(dates, default='')} to "
                               f"{max(dates, default='')}"}
        if not self.data and len(found) != published:
            self.notes["slice"] += f" (its files hold {len(found)}; published are {published})"
        return [Task(row["question_id"], [{"role": "user", "content": _prompt(row)}], data=row) for row in kept]

    def program(self, task: Task, reply: str) -> programs.Program:
        cases = [*json.loads(task.data["public_test_cases"]), *hidden(task.data["private_test_cases"])]
        name, answer = json.loads(task.data["metadata"] or "{}").get("func_name"), code.last_block(reply)
        if name:
            tests = [CALL.format(arguments=[json.loads(line) for line in case["input"].split("\n")],
                                 output=json.loads(case["output"])) for case in cases]
            method = f"getattr(globals()['Solution']() if 'Solution' in globals() else __import__('__main__'), {name!r})"
            return programs.Program(HEADER, answer, tests, method)
        tests = [COMPARE.format(input=case["input"], output=case["output"]) for case in cases]
        return programs.Program(STDIN, answer and f"SOURCE = {answer!r}", tests, "(lambda data: run_program(SOURCE, data))")


def _file(number: int) -> str:
    """The problems that a release added: under $CORRGRPO_DATA, or fetched from the hub as a file, since the data set's own
    loader is a script that `datasets` runs no more."""
    name = f"test{number if number > 1 else ''}.jsonl"
    if here := rows.find_file(f"livecodebench/{name}"):
        return str(here)
    try:
        return huggingface_hub.hf_hub_download(HUB, name, repo_type="dataset")
    except Exception as e:      # the hub's client raises many kinds, all meaning "not to be had"
        raise ValueError(f"livecodebench/{name} is no file under $CORRGRPO_DATA and could not be fetched from {HUB} on the "
                         f"Hugging Face hub: {type(e).__name__}: {str(e).partition(chr(10))[0]}") from None


def hidden(text: str) -> list[dict[str, Any]]:
    """private_test_cases: JSON, or base64 of zlib of a pickled JSON string. What is unpickled may hold no class at all."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_Plain(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"the tests hold {module}.{name}, and should be text")


def _prompt(row: dict[str, str]) -> str:
    if row["starter_code"]:
        how = ("Complete this code; answer with all of it in one ```python block.\n\n"
               f"```python\n{row['starter_code'].rstrip()}\n```")
    else:
        how = "Write a Python program that reads standard input and prints the answer, in one ```python block."
    return f"{row['question_content']}\n\n{how}"
