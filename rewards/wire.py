"""Values between the checker and the candidate: plain ones, and instances of the header's own classes.

Pickle does the work, with an Encoder that turns whatever else there is into something plain, or opaque, and a Decoder
that can build nothing else. Neither side trusts what it reads: the checker because the candidate is hostile.
"""

import collections
import collections.abc
import decimal
import functools
import io
import itertools
import numbers
import os
import pickle
from collections.abc import Callable

MAX_ITEMS = 1_000_000  # taken from an iterator that the answer returns
TYPES = {kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset, type(None))}


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def receive(read: Callable[[int], bytes]) -> bytes:
    """The next frame, from a function that reads up to so many bytes, and none at the end."""
    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = read(size - len(data))
            if not chunk:
                raise EOFError("the other side is gone")
            data += chunk
        return bytes(data)
    return exactly(int.from_bytes(exactly(8), "big"))


def send(fd: int, data: bytes) -> None:
    view = memoryview(frame(data))
    while view:
        view = view[os.write(fd, view):]


def encode(value: object, classes: dict[str, type]) -> bytes:
    buffer = io.BytesIO()
    _Encoder(buffer, classes).dump(value)
    return buffer.getvalue()


def decode(data: bytes, classes: dict[str, type]) -> object:
    decoder = _Decoder(io.BytesIO(data), classes)
    value = decoder.load()
    for node in decoder.nodes:
        if any(map(callable, vars(node).values())):
            raise pickle.UnpicklingError("a field that can be called might stand for a method")
    return value


@functools.cache
def _slots(kind: type) -> list[str]:
    declared = [k.__dict__.get("__slots__", ()) for k in kind.__mro__]
    return [name for names in declared for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


def _fields(node: object) -> dict[str, object]:
    return {name: getattr(node, name) for name in _slots(type(node)) if hasattr(node, name)} | getattr(node, "__dict__", {})


class Opaque:
    """Stands for a value that cannot travel; equals nothing, itself included."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None


def make(kind: str, *parts: object) -> None:
    """Only its name is ever used: the decoder puts its own `_make` in its place."""


class _Encoder(pickle.Pickler):
    """Plain values by pickle's own code; anything else becomes a plain value, a node table or opaque."""

    def __init__(self, file: io.BytesIO, classes: dict[str, type]):
        super().__init__(file, protocol=4)
        self._classes = classes

    def reducer_override(self, value: object):
        if value is make:
            return NotImplemented  # by name
        if any(value is kind for kind in TYPES.values()):
            return make, ("type", value.__name__)
        for plain in (int, float, str, bytes, list, tuple, dict, set, frozenset):  # a subclass is what it extends
            if isinstance(value, plain):
                return make, ("plain", plain(value))
        kind = type(value)
        if kind.__name__ in self._classes:
            return make, ("nodes", self._table(value))
        if isinstance(value, complex):
            return make, ("complex", value.real, value.imag)
        if isinstance(value, numbers.Integral):  # numpy's, and others that register
            return make, ("plain", int(value))
        if isinstance(value, numbers.Real):
            return make, ("plain", float(value))
        if isinstance(value, decimal.Decimal):
            return make, ("decimal", str(value))
        if isinstance(value, collections.abc.KeysView):
            return make, ("plain", set(value))
        if isinstance(value, range):
            return make, ("range", value.start, value.stop, value.step)
        if isinstance(value, collections.deque):
            return make, ("deque", list(value), value.maxlen)
        if kind.__module__.startswith("sortedcontainers") and kind.__name__.startswith("SortedList"):
            return make, ("plain", list(value))
        if hasattr(kind, "__next__"):
            return make, ("iterator", list(itertools.islice(value, MAX_ITEMS)))
        return make, ("opaque",)

    def _table(self, root: object) -> list[tuple[str, dict, dict]]:
        """Linked nodes as a flat list of (class, fields, links): a long list does not recurse, and cycles survive."""
        nodes, index, table = [root], {id(root): 0}, []
        for node in nodes:
            fields, links = {}, {}
            for name, value in _fields(node).items():
                if type(value).__name__ not in self._classes:
                    fields[name] = value
                    continue
                if id(value) not in index:
                    index[id(value)] = len(nodes)
                    nodes.append(value)
                links[name] = index[id(value)]
            table.append((type(node).__name__, fields, links))
        return table


class _Decoder(pickle.Unpickler):
    """Reads what `_Encoder` writes and nothing else: no class or function can be reached by name but `make`, and that
    is a bound method, so that a hostile message changes nothing by setting attributes on it."""

    def __init__(self, file: io.BytesIO, classes: dict[str, type]):
        super().__init__(file)
        self._classes, self.nodes = classes, []

    def find_class(self, module: str, name: str):
        if (module, name) != (__name__, "make"):
            raise pickle.UnpicklingError(f"{module}.{name} may not travel")
        return self._make

    def _make(self, kind: str, *parts: object) -> object:
        if kind == "plain":
            return parts[0]
        if kind == "nodes":
            return self._nodes(parts[0])
        if kind == "opaque":
            return Opaque()
        simple = {"complex": complex, "range": range, "deque": collections.deque, "iterator": list.__iter__, "type": TYPES.get,
                  "decimal": decimal.Decimal}
        return simple[kind](*parts)

    def _nodes(self, table: list[tuple[str, dict, dict]]) -> object:
        nodes = [object.__new__(self._classes[name]) for name, _, _ in table]
        self.nodes += nodes
        for node, (_, fields, links) in zip(nodes, table):
            for name, value in [*fields.items(), *((name, nodes[index]) for name, index in links.items())]:
                if not name.startswith("__"):
                    setattr(node, name, value)
        return nodes[0]


def update(old: object, new: object, classes: dict[str, type]) -> None:
    """Change `old` in place into the value of `new`, a copy of it that was worked on elsewhere, and so on down: who holds
    a part of `old` sees the change there, as far as old and new parts stand in the same places."""
    nodes = tuple(classes.values())
    todo, paired = [(old, new)], {id(old): new}

    def merged(was: object, now: object) -> object:
        """The old part, to be changed in its turn, if it can stand for the new one."""
        if type(was) is not type(now) or not isinstance(was, (list, dict, set, collections.deque, *nodes)):
            return now
        if id(was) not in paired:
            paired[id(was)] = now
            todo.append((was, now))
        return was if paired[id(was)] is now else now

    while todo:
        old, new = todo.pop()
        if isinstance(old, list):
            old[:] = [merged(was, now) for was, now in zip(old, new)] + new[len(old):]
        elif isinstance(old, set | collections.deque):
            old.clear()
            (old.update if isinstance(old, set) else old.extend)(new)
        elif isinstance(old, (dict, *nodes)):
            was, now = (old, new) if isinstance(old, dict) else (vars(old), vars(new))
            changed = {name: merged(was.get(name), value) for name, value in now.items()}
            was.clear()
            was.update(changed)
