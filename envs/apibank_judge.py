"""Runs upstream API-Bank's tool manager for apibank.py: a process of its own, which reads a JSON request a line and writes a
JSON answer a line. The calls come from a model, so it shuts itself in first: no network, nothing to write but its folder.

Upstream's rule (DAMO-ConvAI, api-bank): the names are equal, a fresh ToolManager (v3: one for all) makes the call, and the
tool's check_api_call_correctness accepts the result beside the gold one; any exception is a wrong call.
"""

import importlib.machinery
import json
import os
import resource
import signal
import sys
import types
from pathlib import Path

# Packages that only some of upstream's APIs need. Where one is missing, a stand-in lets the others work, and raises when used.
OPTIONAL = ("googletrans", "nltk", "numpy", "rank_bm25", "requests", "rouge", "sentence_transformers")
MEMORY = 8 << 30    # bytes


class Missing(types.ModuleType):
    """A package that is not installed, or anything taken from it."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise ImportError(f"{self.__name__} is not installed")


class StandIns:
    """Last on sys.meta_path, so asked for what nobody else found."""

    def __init__(self):
        self.missing: set[str] = set()

    def find_spec(self, name: str, path=None, target=None):
        package = name.partition(".")[0]
        if package not in OPTIONAL or not isinstance(sys.modules.get(package, Missing("")), Missing):
            return None         # a part that an installed package lacks is its own affair
        self.missing.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module) -> None:
        pass


def main(folder: str, seconds: int) -> None:
    """seconds: no call lives longer, whoever still waits for it."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from rewards import confine

    del sys.path[0]
    sys.path.insert(0, folder)
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for fd in (1, 2):           # upstream prints
        os.dup2(null, fd)
    confine.limit(resource.RLIMIT_AS, MEMORY)
    confine.limit(resource.RLIMIT_FSIZE, 64 << 20)
    if confine.no_new_privs():
        confine.landlock(folder)
        confine.seccomp(True)
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)

    def tell(**what: object) -> None:
        answers.write(json.dumps(what, default=str) + "\n")
        answers.flush()

    try:
        from tool_manager import ToolManager

        kept = {"v3": ToolManager(), "v3 gold": ToolManager()}
    except BaseException as problem:
        return tell(error=f"{type(problem).__name__}: {problem}")
    tell(missing=sorted(stand_ins.missing))
    for line in requests:
        request = json.loads(line)
        if "describe" in request:
            tell(tool=describe(ToolManager, request["describe"]))
            continue
        manager = kept.get(request.pop("version"))
        if manager is not None:
            signal.alarm(seconds)
            tell(**verdict(manager, request))
            signal.alarm(0)
            continue
        read, write = os.pipe()
        pid = os.fork()         # what a call leaves behind in this process must not reach the next
        if pid == 0:
            signal.alarm(seconds)
            os.closerange(3, write)             # what this process answers on
            os.closerange(write + 1, 256)
            os.write(write, json.dumps(verdict(ToolManager, request)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        tell(**(json.loads(text) if text else {"correct": False, "detail": "the call ended the process"}))


def verdict(manager, request: dict) -> dict:
    """manager: a ToolManager, or the class to make one of."""
    try:
        return {"correct": bool(correct(manager() if isinstance(manager, type) else manager, **request)), "detail": ""}
    except BaseException as problem:
        return {"correct": False, "detail": f"{type(problem).__name__}: {problem}"[:300]}


def correct(manager, name: str, parameters: dict, gold_name: str, gold_result: object) -> bool:
    if name != gold_name:
        raise ValueError(f"it calls {name}, not {gold_name}")
    result = manager.api_call(name, **parameters)
    return manager.init_tool(name).check_api_call_correctness(result, gold_result)


def describe(manager_class, name: str) -> dict:
    """What the tool's class says of itself; an instance may need a package that is missing."""
    try:
        manager = manager_class()
        try:
            found = manager.get_api_by_name(name)["class"]
        except Exception:
            found = manager.init_tool(name)
        return {key: getattr(found, key) for key in ("description", "input_parameters") if hasattr(found, key)}
    except Exception:           # listed by its name alone
        return {}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
