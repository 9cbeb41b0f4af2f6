"""The names that the source of a module defines, without importing it."""

import ast


def names_of(source):
    """Functions, classes, their methods and attributes (``Class.name``), also those that methods set on ``self``."""
    tree = ast.parse(source)
    return {name for node in tree.body for name in _defined(node, "")}


def _defined(node, prefix):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield prefix + node.name
        if prefix:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield prefix + inner.attr
    elif isinstance(node, ast.ClassDef):
        yield prefix + node.name
        for inner in node.body:
            yield from _defined(inner, f"{prefix}{node.name}.")
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield prefix + node.target.id
    elif isinstance(node, ast.Assign):
        yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
