"""Milvus' boolean expressions: written for the engine (`literal`, `ids_in`, `between`, `both`, `without_not`), understood here
(`parse`).

What is understood is the part that every engine reads alike: comparisons of a field with a literal, `in` and `not in`, `and`,
`or`, `not (…)` and parentheses. The rest of the language (https://milvus.io/docs/boolean.md) is passed to Milvus untouched,
and refused by the store in this process.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, SupportsIndex, TypeAlias, TypeVar

from rmvdb.errors import FilterError, Mismatch
from rmvdb.types import Id, IdType, Schema

Predicate: TypeAlias = Callable[[Mapping[str, Any]], bool]
Literal: TypeAlias = bool | int | float | str
_T = TypeVar("_T")

#: Ids strictly between these are served: Milvus 2.3 cannot write the smallest INT64 down, and hides a record of the largest.
INT64_BOUNDS = (-(2**63), 2**63 - 1)

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\\r\n]|\\.)*"|'(?:[^'\\\r\n]|\\.)*')
    | (?P<number>[+-]?\s*(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?!\w))
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign>==|!=|<=|>=|&&|\|\||[<>!()\[\],])
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
#: Types of which every record of a declared field has a value that can be ordered: a FLOAT may be NaN.
_ORDERED = {"INT8", "INT16", "INT32", "INT64", "VARCHAR"}
_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_WORDS = {"and", "or", "not", "in", "true", "false"}
_MISSING = object()


def literal(value: Literal) -> str:
    """A value as Milvus reads it back, whatever quotes, backslashes or line breaks it holds; FilterError for what has no form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        low, high = INT64_BOUNDS
        if not low < value < high:
            raise FilterError(f"{value} cannot be written in a filter; Milvus serves whole numbers between {low} and {high}")
        return str(value)
    if isinstance(value, float):
        if value - value != 0.0:
            raise FilterError(f"{value} cannot be written in a filter; use a finite number")
        return repr(value)
    # Line breaks end a string for every engine; all other characters but the quote and the backslash stand for themselves.
    return '"' + "".join(_ESCAPES.get(character, character) for character in value) + '"'


def checked_id(id: object, schema: Schema) -> Id:
    """The id as the collection keeps it; Mismatch for one that it cannot hold or that no filter could name."""
    if schema.id_type is IdType.VARCHAR and isinstance(id, str):
        return str(id)
    if schema.id_type is IdType.INT64 and isinstance(id, SupportsIndex) and not isinstance(id, bool):
        low, high = INT64_BOUNDS
        if low < (number := operator.index(id)) < high:
            return number
        raise Mismatch(f"The id {id} cannot be served: Milvus misreads or hides the ids {low} and {high}; take one between them")
    raise Mismatch(f"Collection {schema.collection!r} has ids of type {schema.id_type.value}; {id!r} is none")


def ids_in(field: str, ids: Iterable[Id]) -> str:
    """The expression that holds for these ids; there must be at least one, because Milvus Lite 2.5 cannot read an empty list."""
    return f"{field} in [{', '.join(map(literal, ids))}]"


def between(field: str, after: Id | None, upto: Id | None) -> str:
    """The expression `after < field <= upto`; None leaves a side open, "" where both are."""
    low = "" if after is None else f"{field} > {literal(after)}"
    high = "" if upto is None else f"{field} <= {literal(upto)}"
    return both(low, high)


def both(one: str, other: str) -> str:
    """The expression that holds where both do; an empty one always holds."""
    return f"({one}) and ({other})" if one and other else one or other


def closed(text: str) -> str:
    """The expression without blanks around it, fit to be joined with others; FilterError if a bracket or a string stays open.

    Milvus Lite 2.5 mends such an expression by itself, and one like `a) or (b` would slip out of what it is joined with.
    """
    pairs, opened = {")": "(", "]": "["}, ""
    for match in re.finditer(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[]["'()]""", text, re.DOTALL):
        sign = match[0]
        if sign in ("'", '"'):
            raise FilterError(f"The filter {text!r} cannot be understood at position {match.start()}: the string has no end")
        if sign in pairs and not opened.endswith(pairs[sign]):
            raise FilterError(f"The filter {text!r} cannot be understood at position {match.start()}: {sign!r} closes nothing")
        opened = opened[:-1] if sign in pairs else opened + sign * (sign in "([")
    if opened:
        raise FilterError(f"The filter {text!r} cannot be understood at position {len(text)}: {opened[-1]!r} is not closed")
    return text.strip()


def parse(text: str) -> Predicate:
    """The test that an expression is; an empty one always holds.

    A field that a record does not have equals nothing and is neither smaller nor larger than anything, so that only `!=` and
    `not in` hold for it, as in Milvus; a null holds for none. Raises FilterError with the position of what is not understood.
    """
    return _Parser(text, _Tests()).parse() if text.strip() else lambda fields: True


def without_not(text: str, schema: Schema) -> str:
    """The same expression without `not (…)`, which Milvus Lite 2.5 cannot read; untouched where there is none.

    FilterError where the opposite of a comparison cannot be written down, because it also holds for records without a value.
    """
    if not re.search(r"\bnot\b(?!\s+in\b)|!(?!=)", _STRING.sub("''", text), re.IGNORECASE):
        return text
    whole = {field.name for field in schema.fields if field.type in _ORDERED} | {schema.id_field}
    try:
        return _Parser(text, _Texts(whole)).parse()(True)
    except FilterError as exc:
        raise FilterError(f"{exc}; Milvus Lite 2.5 has no `not (…)`: write the opposite comparison") from exc


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Parts(Protocol[_T]):
    """What an expression is made into, part by part."""

    def any(self, parts: list[_T]) -> _T: ...

    def all(self, parts: list[_T]) -> _T: ...

    def opposite(self, part: _T) -> _T: ...

    def compared(self, name: str, sign: str, value: Literal) -> _T: ...

    def contained(self, name: str, values: list[Literal], *, wanted: bool) -> _T: ...


class _Parser(Generic[_T]):
    """Recursive descent: any := all (or all)*, all := one (and one)*, one := not (any) | (any) | comparison."""

    def __init__(self, text: str, parts: _Parts[_T]) -> None:
        self._text, self._parts = text, parts
        self._tokens = self._split()
        self._next = 0

    def parse(self) -> _T:
        whole = self._any()
        if self._peek().kind != "end":
            self._refuse("expected 'and', 'or' or the end")
        return whole

    def _split(self) -> list[_Token]:
        tokens, position, text = [], 0, self._text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                self._fail(start, f"{text[start]!r} cannot stand here")
            kind = str(match.lastgroup)
            token = _Token(kind, match[kind], match.start(kind))
            if kind == "word" and token.text.lower() in _WORDS:
                token = _Token("key", token.text.lower(), token.position)
            tokens.append(token)
            position = match.end()
        return [*tokens, _Token("end", "the end", len(text))]

    def _any(self) -> _T:
        parts = [self._all()]
        while self._take("or", "||"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else self._parts.any(parts)

    def _all(self) -> _T:
        parts = [self._one()]
        while self._take("and", "&&"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else self._parts.all(parts)

    def _one(self) -> _T:
        negated = bool(self._take("not", "!"))
        if negated and self._peek().text != "(":
            self._refuse("expected '(': Milvus negates only what is in parentheses")
        if not self._take("("):
            return self._comparison()
        part = self._any()
        self._expect(")")
        return self._parts.opposite(part) if negated else part

    def _comparison(self) -> _T:
        if self._peek().kind != "word":
            value = self._literal("a field or a literal")
            sign = self._sign()
            return self._parts.compared(self._field(), _FLIPPED[sign], value)
        name = self._field()
        if self._take("not"):
            self._expect("in")
            return self._parts.contained(name, self._list(), wanted=False)
        if self._take("in"):
            return self._parts.contained(name, self._list(), wanted=True)
        return self._parts.compared(name, self._sign(), self._literal("a literal"))

    def _field(self) -> str:
        token = self._peek()
        if token.kind != "word":
            self._refuse("expected the name of a field")
        self._next += 1
        return token.text

    def _sign(self) -> str:
        token = self._peek()
        if token.text not in _COMPARE or token.kind != "sign":
            self._refuse("expected a comparison, 'in' or 'not in'; functions, 'like', paths and arithmetic are left to Milvus")
        self._next += 1
        return token.text

    def _list(self) -> list[Literal]:
        self._expect("[")
        values: list[Literal] = []
        while not self._take("]"):
            values.append(self._literal("a literal or ']'"))
            if self._peek().text != "]":
                self._expect(",")
        return values

    def _literal(self, what: str) -> Literal:
        token = self._peek()
        if token.kind == "string":
            value: Literal = self._unescaped(token)
        elif token.kind == "number":
            digits = "".join(token.text.split())
            value = int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)
        elif token.kind == "key" and token.text in ("true", "false"):
            value = token.text == "true"
        else:
            self._refuse(f"expected {what}")
        self._next += 1
        return value

    def _unescaped(self, token: _Token) -> str:
        def character(match: re.Match[str]) -> str:
            body = match[1]
            if body[0] in "xu" and len(body) > 1:
                return chr(int(body[1:], 16))
            if body not in _UNESCAPES and body not in "\\'\"":
                self._fail(token.position + match.start() + 1, f"the escape {match[0]!r} is not known")
            return _UNESCAPES.get(body, body)

        return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", character, token.text[1:-1])

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> str:
        token = self._peek()
        if token.kind not in ("key", "sign") or token.text not in texts:
            return ""
        self._next += 1
        return token.text

    def _expect(self, text: str) -> None:
        if not self._take(text):
            self._refuse(f"expected {text!r}")

    def _refuse(self, wanted: str) -> NoReturn:
        token = self._peek()
        self._fail(token.position, f"{wanted}, found {token.text if token.kind == 'end' else repr(token.text)}")

    def _fail(self, position: int, reason: str) -> NoReturn:
        raise FilterError(f"The filter {self._text!r} cannot be understood at position {position}: {reason}")


class _Tests:
    """Each part as a test of a record's fields."""

    def any(self, parts: list[Predicate]) -> Predicate:
        return lambda fields: any(test(fields) for test in parts)

    def all(self, parts: list[Predicate]) -> Predicate:
        return lambda fields: all(test(fields) for test in parts)

    def opposite(self, part: Predicate) -> Predicate:
        return lambda fields: not part(fields)

    def compared(self, name: str, sign: str, value: Literal) -> Predicate:
        compare = _COMPARE[sign]

        def test(fields: Mapping[str, Any]) -> bool:
            found = fields.get(name, _MISSING)
            if found is None:
                return False
            return compare(found, value) if _kind(found) is _kind(value) else sign == "!="

        return test

    def contained(self, name: str, values: list[Literal], *, wanted: bool) -> Predicate:
        known = {(_kind(value), value) for value in values}

        def test(fields: Mapping[str, Any]) -> bool:
            found = fields.get(name, _MISSING)
            if found is None:
                return False
            kind = _kind(found)
            return ((kind, found) in known) is wanted if kind in (bool, float, str) else not wanted

        return test


#: The text of a part where it shall hold, or of its opposite.
_Text: TypeAlias = Callable[[bool], str]


class _Texts:
    """Each part as text, with the negations pushed into the comparisons."""

    def __init__(self, ordered: set[str]) -> None:
        self._ordered = ordered

    def any(self, parts: list[_Text]) -> _Text:
        return lambda holds: (" or " if holds else " and ").join(f"({part(holds)})" for part in parts)

    def all(self, parts: list[_Text]) -> _Text:
        return lambda holds: (" and " if holds else " or ").join(f"({part(holds)})" for part in parts)

    def opposite(self, part: _Text) -> _Text:
        return lambda holds: part(not holds)

    def compared(self, name: str, sign: str, value: Literal) -> _Text:
        def text(holds: bool) -> str:
            written, comparison = (f"{name} {each} {literal(value)}" for each in (sign if holds else _OPPOSITE[sign], sign))
            if not holds and sign not in ("==", "!=") and name not in self._ordered:
                raise FilterError(f"`not ({comparison})` also holds where {name} is missing or no number, and {written} does not")
            return written

        return text

    def contained(self, name: str, values: list[Literal], *, wanted: bool) -> _Text:
        listed = ", ".join(map(literal, values))
        return lambda holds: f"{name} {'in' if holds is wanted else 'not in'} [{listed}]"


def _kind(value: object) -> type:
    """What a value can be compared with: true is not 1, but 1 is 1.0."""
    if isinstance(value, bool):
        return bool
    return float if isinstance(value, int | float) else type(value)
