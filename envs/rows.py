"""Rows of a data set from where they are: a .jsonl, .json, .jsonl.gz, .json.gz or .parquet file as named or under
$CORRGRPO_DATA, or a data set name on the Hugging Face hub."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")


def load(data: str, split: str) -> tuple[str, list[tuple[int, Any]]]:
    """(source, [(line or row number, row)]) of a split; "{split}" in a file's name stands for the split's name.

    Raises ValueError that names what is missing or unreadable, and where.
    """
    name = data.replace("{split}", split)
    path = find_file(name)
    if path is None and name.count("/") == 1 and not name.endswith(SUFFIXES):
        source, rows = name, _from_hub(name, split)
    elif path is None:
        raise ValueError(f"env.data = {data!r}: there is no file {name!r}, neither here nor under "
                         f"$CORRGRPO_DATA ({os.environ.get('CORRGRPO_DATA', 'not set')})")
    else:
        source, rows = str(path), _from_file(path)
    rows = list(rows)
    if not rows:
        raise ValueError(f"{source} holds no rows")
    return source, rows


def texts(data: str, split: str, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows, each an object with strings under the `needed` keys. Raises ValueError that names the file and the row."""
    source, found = load(data, split)
    for line, row in found:
        if not isinstance(row, dict):
            raise ValueError(f"{source}, row {line}: expected an object with {', '.join(needed)}, got {str(row)[:60]!r}")
        wrong = [key for key in needed if not isinstance(row.get(key), str)]
        if wrong:
            raise ValueError(f"{source}, row {line} ({row.get('task_id')}): {wrong[0]!r} is missing or no string; a row "
                             f"needs {', '.join(needed)}")
    return [row for _, row in found]


def find_file(name: str) -> Path | None:
    """A data file as named, or under $CORRGRPO_DATA."""
    places = [Path(name).expanduser(), Path(os.environ.get("CORRGRPO_DATA") or ".") / name]
    return next((p for p in places if p.is_file()), None)


def _from_file(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path} is a parquet file: pip install pyarrow") from None
        try:
            yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        except pyarrow.ArrowException as e:
            raise ValueError(f"{path} is not a readable parquet file: {e}") from None
        return
    line, whole = 0, path.name.removesuffix(".gz").endswith(".json")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as f:
            if whole:
                rows = json.load(f)
                if not isinstance(rows, list):
                    raise ValueError("a .json file must hold a list of rows")
                yield from enumerate(rows, 1)
                return
            for line, text in enumerate(f, 1):
                if text.strip():
                    yield line, json.loads(text)
    except (OSError, EOFError, ValueError, zlib.error) as e:
        where = "" if whole else f", line {line}" if isinstance(e, json.JSONDecodeError) else f", after line {line}"
        raise ValueError(f"{path}{where}: unreadable ({e})") from None


def _from_hub(name: str, split: str) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"env.data = {name!r} is no file here; to fetch it as a data set: pip install datasets") from None
    try:
        yield from enumerate(datasets.load_dataset(name, split=split), 1)
    except Exception as e:  # the hub's client raises many kinds, all meaning "not to be had"
        raise ValueError(f"env.data = {name!r} is no file here and could not be fetched from the Hugging Face hub: "
                         f"{type(e).__name__}: {e}") from None
