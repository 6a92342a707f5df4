"""A bound tree in the words of an engine.

Some engines cannot express every filter, and some answer another question. The text written here is true for every record that
the tree is true for. `Written.exact` says whether it is true for these only. If not, the caller tests each answer again
(`evaluate`). Negations move down to the leaves first, because Milvus Lite 2.5 lacks them. `and` and `or` become balanced trees:
an engine reads a chain of thousands level by level, and Lite 2.5 takes some fifty levels.

Measured differences:

- Lite 2.5 reads `1 == a` as `a != 1`, `5 > a >= 1` as `1 < a <= 5`, and `like "%"` as `== "%"`. It cannot read a line break in a
  text. It lacks `not (…)`, `exists`, `is null`, `in []`, and arithmetic on JSON. `a in [0.5]` finds NaN in a FLOAT.
- Lite 3 takes true for 1 in JSON, and misses missing values by `!=`, `not in` and `not (…)`. It divides whole numbers with a
  remainder, lacks `%` and paths with `in`, and compares a FLOAT with all digits of the literal.
- Milvus 2.3.5 takes the `_` of `like` literally and knows only prefixes.
- On all of them an element that an ARRAY lacks is not unequal to anything, yet `not in` a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rmvdb.canonical.ids import INT64_BOUNDS
from rmvdb.engines.filters.bind import REAL, WHOLE
from rmvdb.engines.filters.evaluate import pieces
from rmvdb.engines.filters.tree import (
    OPEN,
    All,
    Any,
    Arithmetic,
    Compare,
    Contains,
    In,
    IsNull,
    Length,
    Like,
    Literal,
    Name,
    Not,
    Tree,
)
from rmvdb.engines.filters.words import BREAKS, literal
from rmvdb.errors import FilterError
from rmvdb.types import IdType, Schema

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
#: The most comparisons that replace a list, if an engine lacks lists.
_SPELLED_OUT = 1_000
#: The most levels of a written tree.
_LEVELS = 40
#: The names of fields that Lite 3 reads in a function.
_IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_]*")
#: What every engine takes as it stands in a key of JSON: it reads no escape there, and cuts the keys at `][`.
_UNREADABLE = re.compile(r'["\\]|\]\[')
_KEYWORDS = {"and", "or", "not", "in", "like", "is", "null", "exists", "iso", "interval", "true", "false"}
_SAFE, _LARGE, _EXACT = 2**31, 2**62, 2**53


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The filters that an engine can read."""

    name: str
    #: `not (…)`.
    negates: bool = True
    #: Line breaks in texts, as `\\n`.
    breaks: bool = True
    #: Values in JSON are compared as the values that they are.
    json: bool = True
    #: `exists`.
    exists: bool = True
    #: `is null`, if the schema allows null.
    nulls: bool = True
    #: `like` with more than a prefix.
    patterns: bool = True
    #: A list of FLOAT or DOUBLE.
    reals: bool = True
    #: `/` and `%` of whole numbers.
    divides: bool = True


LITE_2 = Dialect(name="Milvus Lite 2.5", negates=False, breaks=False, exists=False, nulls=False, reals=False)
LITE_3 = Dialect(name="Milvus Lite 3", json=False, divides=False)
MILVUS = Dialect(name="this Milvus")
MILVUS_2_3 = Dialect(name="Milvus 2.3", nulls=False, patterns=False)


class Written(NamedTuple):
    """A filter for an engine."""

    #: "" for every record.
    text: str
    #: Whether it is true only for records that the tree is true for.
    exact: bool


class _Part(NamedTuple):
    """A part of a filter. Its text is None if it is true for every record, "" if for none."""

    text: str | None
    exact: bool = True
    levels: int = 1


_EVERY, _NONE, _TEST_LATER = _Part(None), _Part(""), _Part(None, exact=False)


def write(tree: Tree, dialect: Dialect, schema: Schema) -> Written:
    """Write a bound tree for an engine. Raises FilterError if the text would be nested too deep."""
    part = _Writer(dialect).tree(tree, holds=True)
    if part.levels > _LEVELS:
        raise FilterError(f"The filter is nested {part.levels} levels deep, and engines read {_LEVELS}; write it flatter")
    if part.text == "":  # engines lack a word for "never"
        return Written(f"{schema.id_field} < {literal('' if schema.id_type is IdType.VARCHAR else INT64_BOUNDS[0] + 1)}", True)
    return Written(part.text or "", part.exact)


class _Writer:
    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def tree(self, tree: Tree, *, holds: bool) -> _Part:
        match tree:
            case Not(part):
                return self.tree(part, holds=not holds)
            case All(parts):
                return (_all if holds else _any)([self.tree(part, holds=holds) for part in parts])
            case Any(parts):
                return (_any if holds else _all)([self.tree(part, holds=holds) for part in parts])
            case Compare(left, sign, right):
                return self._compare(left, sign, right, holds=holds)
            case In(name, values):
                return self._in(name, values, holds=holds)
            case Contains(name, which, values):
                return self._contains(name, which, values, holds=holds)
            case Like(name, pattern):
                return self._like(name, pattern, holds=holds)
            case IsNull(name):
                return self._null(name, holds=holds)

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _compare(self, left: Name | Length | Arithmetic, sign: str, right: Literal | Name, *, holds: bool) -> _Part:
        wanted = sign if holds else _OPPOSITE[sign]
        if isinstance(left, Length):
            return self._length(left.name, wanted, right)
        if isinstance(left, Arithmetic):
            return self._arithmetic(left, wanted, right)
        if isinstance(right, Name):
            return self._two_fields(left, sign, right, holds=holds)
        if not self._writable(left, right):
            return _TEST_LATER
        if left.type == OPEN:
            return self._open(left, sign, right, holds=holds)
        if left.type in REAL and left.path:  # it was not measured whether engines round the literal as they round an element
            return _TEST_LATER
        text = f"{left.name}{_path(left)} {wanted} {literal(right)}"
        if left.type not in REAL or holds or sign in ("==", "!="):
            return _Part(text)
        if self._dialect.negates:
            return _Part(f"not ({left.name} {sign} {literal(right)})")
        return _Part(f"({text} or {left.name} != {left.name})", levels=2)  # NaN

    def _open(self, name: Name, sign: str, value: Literal, *, holds: bool) -> _Part:
        place, wanted = spelled_name(name), sign if holds else _OPPOSITE[sign]
        if not self._dialect.json:
            return self._open_loosely(name, wanted, value, holds=holds)
        if holds or sign in ("==", "!="):
            return _Part(f"{place} {wanted} {literal(value)}")
        return _Part(f"not ({place} {sign} {literal(value)})") if self._dialect.negates else _TEST_LATER

    def _open_loosely(self, name: Name, wanted: str, value: Literal, *, holds: bool) -> _Part:
        """Write for an engine to which true is 1, and a missing value is neither equal nor unequal."""
        place, text = spelled_name(name), f"{spelled_name(name)} {wanted} {literal(value)}"
        if isinstance(value, int | float) and abs(value) >= _EXACT:
            return _TEST_LATER
        if wanted == "!=":
            plain = isinstance(value, str) and not name.path
            return _Part(f"({text} or {place} is null)", exact=False, levels=2) if plain else _TEST_LATER
        return _Part(text, exact=False) if holds or wanted == "==" else _TEST_LATER

    def _two_fields(self, left: Name, sign: str, right: Name, *, holds: bool) -> _Part:
        if left.type != right.type and {left.type, right.type} - WHOLE:
            return _TEST_LATER  # engines round differently
        text = f"{left.name} {sign if holds else _OPPOSITE[sign]} {right.name}"
        if left.type not in REAL or holds or sign in ("==", "!="):
            return _Part(text)
        return _Part(f"not ({left.name} {sign} {right.name})") if self._dialect.negates else _TEST_LATER

    def _arithmetic(self, left: Arithmetic, sign: str, right: Literal | Name) -> _Part:
        name, by = left.name, left.value
        if (
            name.type == OPEN
            or name.type == "FLOAT"
            or name.path
            or sign not in ("==", "!=")
            or not isinstance(right, int | float)
        ):
            return _TEST_LATER
        if name.type == "DOUBLE":
            known_good = False
        elif left.sign in "/%":
            known_good = self._dialect.divides and by > 0
            if not known_good:
                return _TEST_LATER
        else:  # past 64 bits engines wrap around to the smallest number
            known_good = abs(by) < _SAFE and abs(right) < _LARGE and (left.sign != "*" or name.type != "INT64")
        if not known_good and sign == "!=":
            return _TEST_LATER
        step = {"+": "-", "-": "+"}.get(left.sign, left.sign) if by < 0 else left.sign
        by = abs(by) if step != left.sign else by
        return _Part(f"{name.name} {step} {literal(by)} {sign} {literal(right)}", exact=known_good)

    def _length(self, name: Name, sign: str, right: Literal | Name) -> _Part:
        if name.type == OPEN or sign not in ("==", "!=") or isinstance(right, Name):
            return _TEST_LATER
        return _Part(f"array_length({name.name}) {sign} {literal(right)}")

    # --- lists --------------------------------------------------------------------------------------------------------

    def _in(self, name: Name, values: Sequence[Literal], *, holds: bool) -> _Part:
        if not values:
            return _NONE if holds else _EVERY
        if not self._writable(name, *values) or (name.type in REAL and name.path):
            return _TEST_LATER
        groups = [[value for value in values if type(value) is kind] for kind in dict.fromkeys(map(type, values))]
        listed = (name.type == OPEN and self._dialect.json) or (name.type != OPEN and not name.path)
        if listed and (name.type not in REAL or self._dialect.reals):
            place, word = spelled_name(name), "in" if holds else "not in"
            parts = [_Part(f"{place} {word} [{', '.join(map(literal, group))}]") for group in groups]
            return (_any if holds else _all)(parts)
        if len(values) > _SPELLED_OUT:
            return _TEST_LATER
        distinct = dict.fromkeys((type(value), value) for value in values)
        parts = [self._compare(name, "==", value, holds=holds) for _, value in distinct]
        return (_any if holds else _all)(parts)

    def _contains(self, name: Name, which: str, values: Sequence[Literal], *, holds: bool) -> _Part:
        negated = not holds and (not self._dialect.negates or name.nullable or (name.type == OPEN and not self._dialect.json))
        real = name.element in REAL
        place = spelled_name(name) if self._dialect.json or not name.meta else f"{name.name}{_path(name)}"
        if negated or real or not self._writable(name, *values) or not (_plain(name) or self._dialect.json):
            return _TEST_LATER
        exact, written = True, [*values]
        if name.type == OPEN:  # as a float, the literal is equal to 1 and to 1.0
            large = any(isinstance(value, int) and abs(value) >= _EXACT for value in values)
            exact = self._dialect.json and not large
            written = [float(value) if isinstance(value, int) and not isinstance(value, bool) else value for value in values]
        if not exact and not holds:
            return _TEST_LATER
        function = ("json" if name.type == OPEN else "array") + "_contains" + ("" if which == "one" else f"_{which}")
        listed = ", ".join(map(literal, written))
        text = f"{function}({place}, {listed if which == 'one' else f'[{listed}]'})"
        return _Part(text if holds else f"not ({text})", exact)

    # --- texts and nulls ----------------------------------------------------------------------------------------------

    def _like(self, name: Name, pattern: str, *, holds: bool) -> _Part:
        found = pieces(pattern)
        first = found[0][1:] if found and found[0][0] == "\0" else ""
        if not found or found == ["\0" + first]:
            return self._compare(name, "==", first, holds=holds)
        if set(found) == {"%"} and name.type == "VARCHAR" and not name.nullable:
            return _EVERY if holds else _NONE
        plain = {"%", "_", "\\"}.isdisjoint("".join(piece[1:] for piece in found if piece[0] == "\0")) and "_" not in found
        exact = plain and set(found) != {"%"} and (found[1:] == ["%"] or self._dialect.patterns) and "%%" not in pattern
        exact = exact and self._writable(name, pattern)
        if holds and exact:
            return _Part(f"{spelled_name(name)} like {literal(pattern)}")
        if not holds and exact and self._dialect.negates and not name.nullable and (name.type != OPEN or self._dialect.json):
            return _Part(f"not ({spelled_name(name)} like {literal(pattern)})")
        start = first[: min((at for at, character in enumerate(first) if character in "%_\\"), default=len(first))]
        if holds and start and self._writable(name, start):
            return _Part(f"{spelled_name(name)} like {literal(start + '%')}", exact=False)
        return _TEST_LATER

    def _null(self, name: Name, *, holds: bool) -> _Part:
        place = spelled_name(name)
        if name.type == OPEN:
            return self._nothing(name, holds=holds)
        if not name.nullable:
            return _NONE if holds else _EVERY
        if name.path or not self._dialect.nulls:
            return _TEST_LATER
        return _Part(f"{place} is {'' if holds else 'not '}null")

    def _nothing(self, name: Name, *, holds: bool) -> _Part:
        """Write whether a value in JSON, or in an undeclared field, is missing or null."""
        if not self._writable(name):
            return _TEST_LATER
        if not self._dialect.json and not name.path:
            return _Part(f"{spelled_name(name)} is {'' if holds else 'not '}null")
        if not holds and self._dialect.exists and (name.meta or name.path):  # to `exists` a null is a value
            return _Part(f"(exists {spelled_name(name)})", exact=False)  # Milvus 2.3 reads the `and` behind it as its own
        return _TEST_LATER

    def _writable(self, name: Name, *values: Literal) -> bool:
        """Return whether the engine reads these texts and this place in JSON as they are."""
        texts = [value for value in (*values, name.name, *name.path) if isinstance(value, str)]
        if (
            name.absent
            or "" in (name.name, *name.path)
            or any(not BREAKS.isdisjoint(part) or _UNREADABLE.search(part) for part in (name.name, *map(str, name.path)))
        ):
            return False
        if not self._dialect.json and any(str(part).isdigit() for part in name.path) and name.type == OPEN:
            return False  # elsewhere an element's number and a key of the same digits are equal
        return self._dialect.breaks or all(BREAKS.isdisjoint(text) for text in texts)


def _all(parts: Iterable[_Part]) -> _Part:
    parts = list(parts)
    if any(part.text == "" for part in parts):
        return _NONE
    return _joined("and", [part for part in parts if part.text is not None], exact=all(part.exact for part in parts), empty=None)


def _any(parts: Iterable[_Part]) -> _Part:
    parts = [part for part in parts if part.text != ""]
    if every := [part for part in parts if part.text is None]:
        return max(every, key=lambda part: part.exact)
    return _joined("or", parts, exact=all(part.exact for part in parts), empty="")


def _joined(word: str, parts: Sequence[_Part], *, exact: bool, empty: str | None) -> _Part:
    """Join the parts as a balanced tree."""
    if not parts:
        return _Part(empty, exact)
    if len(parts) == 1:
        return parts[0]._replace(exact=exact)
    half = len(parts) // 2
    one, other = (_joined(word, some, exact=True, empty=empty) for some in (parts[:half], parts[half:]))
    return _Part(f"({one.text} {word} {other.text})", exact, max(one.levels, other.levels) + 1)


def _path(name: Name) -> str:
    return "".join(f"[{literal(part)}]" for part in name.path)


def _plain(name: Name) -> bool:
    return bool(_IDENTIFIER.fullmatch(name.name)) and name.name.lower() not in _KEYWORDS


def spelled_name(name: Name) -> str:
    """Return a name as every engine reads it."""
    return f"$meta[{literal(name.name)}]{_path(name)}" if name.meta else f"{name.name}{_path(name)}"
