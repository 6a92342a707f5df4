"""A filter's tree, written as a text again."""

from __future__ import annotations

from rmvdb.engines.filters import literal
from rmvdb.engines.filters.tree import All, Any, Arithmetic, Compare, Contains, In, IsNull, Length, Like, Literal, Name, Not, Tree
from rmvdb.engines.filters.write import spelled_name


def spelled(tree: Tree) -> str:
    """Return a tree in Milvus' words, for whatever engine."""
    match tree:
        case All(parts):
            return " and ".join(f"({spelled(part)})" for part in parts)
        case Any(parts):
            return " or ".join(f"({spelled(part)})" for part in parts)
        case Not(IsNull(name, "exists")):
            return f"exists {spelled_name(name)}"
        case Not(part):
            return f"not ({spelled(part)})"
        case Compare(left, sign, right):
            return f"{_spelled_operand(left)} {sign} {_spelled_operand(right)}"
        case In(name, values):
            return f"{spelled_name(name)} in [{', '.join(map(literal, values))}]"
        case Contains(name, which, values):
            listed = ", ".join(map(literal, values))
            listed = listed if which == "one" else f"[{listed}]"
            return f"json_contains{'' if which == 'one' else f'_{which}'}({spelled_name(name)}, {listed})"
        case Like(name, pattern):
            return f"{spelled_name(name)} like {literal(pattern)}"
        case IsNull(name):
            return f"{spelled_name(name)} is null"


def _spelled_operand(operand: Name | Length | Arithmetic | Literal) -> str:
    match operand:
        case Name():
            return spelled_name(operand)
        case Length(name):
            return f"array_length({spelled_name(name)})"
        case Arithmetic(name, sign, value):
            return f"{spelled_name(name)} {sign} {literal(value)}"
        case _:
            return literal(operand)
