"""The recipes as README.md has them: tests execute the lines that a reader copies."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def recipe(name: str) -> str:
    """The text of the fenced block after the comment <!-- recipe: NAME -->."""
    found = re.findall(rf"<!-- recipe: {re.escape(name)} -->\n+```\w*\n(.*?)\n```\n", README.read_text(encoding="utf-8"), re.S)
    assert len(found) == 1, f"README.md has {len(found)} recipes named {name}"
    return found[0] + "\n"


def run(name: str) -> dict:
    """Executes a recipe as a module would be; returns its names."""
    names = {"__name__": f"recipe_{name}"}
    exec(compile(recipe(name), f"README.md: {name}", "exec"), names)
    return names
