"""What the syntax tree of an answer shows: its shape, for the `ast` reward, and whether it defines what the test calls."""

import ast

MAX_TOKENS = 2000  # of a shape; the longest reference of LeetCodeDataset v0.3.1 has about 1,200

_CODES = {name: index for index, name in enumerate(n for n in dir(ast) if isinstance(getattr(ast, n), type))}


def shape(tree: ast.AST) -> str:
    """The tree in pre-order, a character for entering and one for leaving each node, of the node's type alone: blind to
    identifiers and literals. Cut off at MAX_TOKENS."""
    tokens: list[str] = []
    todo: list[tuple[ast.AST, int]] = [(tree, 0)]
    while todo and len(tokens) < MAX_TOKENS:
        node, leaving = todo.pop()
        tokens.append(chr(0x100 + 2 * _CODES[type(node).__name__] + leaving))
        if not leaving:
            todo.append((node, 1))
            todo += [(child, 0) for child in reversed(list(ast.iter_child_nodes(node)))]
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
