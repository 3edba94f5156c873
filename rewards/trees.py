"""What the syntax tree of an answer shows: its shape, for the `ast` reward, and whether it defines what the test calls."""

import ast

MAX_TOKENS = 2000  # of a shape; the longest reference of LeetCodeDataset v0.3.1 has about 1,200

_KINDS = [kind for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.AST)]
_TOKENS = {kind: (chr(0x100 + 2 * n), chr(0x101 + 2 * n)) for n, kind in enumerate(_KINDS)}  # for entering, for leaving


def shape(tree: ast.AST) -> str:
    """The tree in pre-order, a character for entering and one for leaving each node, of the node's type alone: blind to
    identifiers and literals. Cut off at MAX_TOKENS."""
    tokens: list[str] = []
    todo: list[ast.AST | str] = [tree]
    while todo and len(tokens) < MAX_TOKENS:
        node = todo.pop()
        if isinstance(node, str):
            tokens.append(node)
            continue
        enter, leave = _TOKENS[type(node)]
        tokens.append(enter)
        todo.append(leave)
        for name in reversed(node._fields):
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                todo.append(value)
            elif isinstance(value, list):
                todo += [item for item in reversed(value) if isinstance(item, ast.AST)]
    return "".join(tokens)


def binds(tree: ast.Module, entry_point: str) -> bool:
    """Whether the top level defines or assigns the entry point's name, `Solution` in "Solution().f"."""
    name = entry_point.split("(")[0].split(".")[0].strip()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False
