"""Changes of Python files, made from their syntax trees: one comparison, constant or statement."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from mutations.trial import ROOT, Change

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# What says something and does nothing.
_SPOKEN = ("_log", "log", "warn", "warning", "info", "debug", "print")


def changes(path: str, tests: tuple[str, ...]) -> list[Change]:
    """Return all changes of a file, in the order of its lines."""
    text = (ROOT / path).read_text()
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def column(line: int, byte: int) -> int:
        return len(lines[line - 1].encode()[:byte].decode())

    found = []
    for node, new in _variants(ast.parse(text)):
        begin = column(node.lineno, node.col_offset)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + column(node.end_lineno, node.end_col_offset)
        old = text[starts[node.lineno - 1] + begin : end]
        if new != old:
            found.append(Change(path, old, new, tests, line=node.lineno, column=begin))
    return found


def sample(tests: dict[str, tuple[str, ...]], seed: int, count: int) -> list[Change]:
    """Choose changes at random, from each file as many as it has lines, compared with others."""
    choice = random.Random(seed)
    every = [change for path in sorted(tests) for change in changes(path, tests[path])]
    return choice.sample(every, min(count, len(every)))


def _variants(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes and what they become. What is only said or annotated is left alone."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.expr | ast.stmt):
            yield from ((node, new) for new in _of(node))
        stack[:0] = _within(node)


def _within(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return []
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return []
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Expr) and _is_spoken(node):
        return []
    if isinstance(node, ast.Module):  # numbers that have names there are times, sizes and colours
        return [each for each in node.body if not _is_constant(each)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    return list(ast.iter_child_nodes(node))


def _is_constant(node: ast.stmt) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and target.id.isupper()


def _is_spoken(node: ast.Expr) -> bool:
    if isinstance(node.value, ast.Constant):  # a docstring
        return True
    call = node.value
    return isinstance(call, ast.Call) and any(
        name in ast.unparse(call.func).split(".") for name in _SPOKEN
    )


def _of(node: ast.expr | ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        ops = [_COMPARED[type(node.ops[0])](), *node.ops[1:]]
        yield f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _COUNTED and not _is_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, _COUNTED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not _starred(node.args[:2]):
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second):
            yield ast.unparse(ast.Call(node.func, [second, first, *others], node.keywords))
    elif _is_deed(node):
        yield "pass"


def _is_deed(node: ast.expr | ast.stmt) -> bool:
    """Say whether a statement changes something that others see."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and not _is_spoken(node)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute)
    return isinstance(node, ast.AugAssign)


def _starred(nodes: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
        for part in (node.left, node.right)
    )


def files(patterns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the tests of each file that a pattern names; the first pattern that fits counts."""
    found: dict[str, tuple[str, ...]] = {}
    for pattern, tests in patterns.items():
        for path in sorted(ROOT.glob(f"src/phalanx/{pattern}")):
            found.setdefault(str(path.relative_to(ROOT)), tests)
    return found


def tests_exist(patterns: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the tests that are named and are not there."""
    named = {test.split("::")[0] for tests in patterns.values() for test in tests}
    return sorted(name for name in named if not Path(ROOT, name).exists())
