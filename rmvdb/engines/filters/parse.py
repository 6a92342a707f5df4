"""A parser from a filter's text to its tree, by Milvus' grammar (https://milvus.io/docs/boolean.md).

    or      := and (("or" | "||") and)*
    and     := equal (("and" | "&&") equal)*
    equal   := range (("==" | "!=") range)?
    range   := member (("<" | "<=" | ">" | ">=") member){0,2}
    member  := sum (["not"] "in" list | "like" string | "is" ["not"] "null")?
    sum     := product (("+" | "-") product)*
    product := unary (("*" | "/" | "%") unary)*
    unary   := ("+" | "-" | "not" | "!") unary | power
    power   := primary ("**" unary)?
    primary := literal | name | function "(" … ")" | "exists" name | "(" or ")"
    name    := (identifier | "$meta") ("[" (string | whole number) "]")*

Parts that need no record are computed here. Keywords and functions may be in upper or lower case.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeAlias, cast

from rmvdb.engines.filters.tree import All, Any, Arithmetic, Compare, Contains, In, IsNull, Length, Like, Literal, Name, Not, Tree
from rmvdb.errors import FilterError

#: The most levels of parentheses, negations and signs: Milvus Lite 2.5 takes some 50, and the stack of this process is limited.
DEEPEST = 32
#: The most characters of a filter: a list of 100,000 whole numbers takes a server 6 s, one of a million over a minute.
LONGEST = 1_000_000
#: The most characters of a filter whose tree is kept: the tree of a list of 10,000 ids takes 0.44 MB.
_KEPT = 10_000

_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_UNESCAPED = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_UNESCAPED |= {sign: sign for sign in "\\'\"?"}
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:
      (?P<string>"(?:[^"\\\r\n]|\\[^\r\n])*"|'(?:[^'\\\r\n]|\\[^\r\n])*')
    | (?P<number>(?:0[xX][0-9a-fA-F]+|0[bB][01]+|(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.]))
    | (?P<word>(?:[A-Za-z_][A-Za-z0-9_]*|\$meta)(?!\w))
    | (?P<sign>==|!=|<=|>=|&&|\|\||\*\*|[<>!()\[\],+\-*/%])
    )""",
    re.VERBOSE,
)
_KEYS = {"and", "or", "not", "in", "like", "true", "false"}
_CONTAINS = {f"{kind}_contains{which}": which[1:] or "one" for kind in ("array", "json") for which in ("", "_all", "_any")}
_PARTS = (Compare, In, Contains, Like, IsNull, Not, All, Any)
#: The most characters of a reason, which may quote a word of the filter.
LONGEST_REASON = 500
_META = "$meta"

_Operand: TypeAlias = Literal | Name | Length | Arithmetic
_Node: TypeAlias = _Operand | Tree


def parse(text: str) -> Tree:
    """Parse a filter into a tree that is not bound to a schema. Raises FilterError with the position of an error."""
    return _kept(text) if len(text) <= _KEPT else _parsed(text)


def _parsed(text: str) -> Tree:
    if len(text) > LONGEST:
        raise FilterError(
            f"The filter {shown(text)} has {len(text):,} characters; write at most {LONGEST:,}, and put the rest into another"
        )
    try:
        return _Parser(text).parse()
    except RecursionError:  # the caller's own stack is deep
        refuse(text, 0, "this is nested too deep; write it flatter")


_kept = functools.lru_cache(maxsize=256)(_parsed)


def refuse(text: str, position: int, reason: str) -> NoReturn:
    """Raise the FilterError of a text with an error at a position."""
    why = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
    raise FilterError(f"The filter {shown(text)} cannot be understood at position {position}: {why}")


def shown(text: str) -> str:
    """Return a filter as messages show it."""
    return repr(text if len(text) <= 300 else f"{text[:300]}…")


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Parser:
    """Recursive descent, a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = self._depth = 0

    def parse(self) -> Tree:
        whole = self._holding(self._or, self._peek())
        if self._peek().kind != "end":
            self._refuse("expected 'and', 'or' or the end")
        return whole

    # --- parts that are true or false -------------------------------------------------------------------------------------

    def _or(self) -> _Node:
        return self._joined(self._and, ("or", "||"), Any)

    def _and(self) -> _Node:
        return self._joined(self._equal, ("and", "&&"), All)

    def _joined(self, part: Callable[[], _Node], words: tuple[str, ...], kind: type[All] | type[Any]) -> _Node:
        start = self._peek()
        first = part()
        if not self._sees(*words):
            return first
        parts = [self._holds(first, start)]
        while self._take(*words):
            parts.append(self._holding(part, self._peek()))
        return kind(tuple(each for one in parts for each in (one.parts if isinstance(one, kind) else (one,))))

    def _equal(self) -> _Node:
        start = self._peek()
        left = self._range()
        if sign := self._take("==", "!="):
            return self._compared(left, start, sign, self._range, self._peek())[0]
        return left

    def _range(self) -> _Node:
        start = self._peek()
        left = self._member()
        if not (sign := self._take("<", "<=", ">", ">=")):
            return left
        middle = self._peek()
        first, right = self._compared(left, start, sign, self._member, middle)
        second = self._peek()
        if not (again := self._take("<", "<=", ">", ">=")):
            return first
        if again[0] != sign[0] or isinstance(right, Literal):
            self._fail(second.position, f"{again!r} cannot follow here; join two comparisons by 'and'")
        return All((first, self._compared(right, middle, again, self._member, self._peek())[0]))

    def _compared(
        self, left: _Node, start: _Token, sign: str, operand: Callable[[], _Node], right_start: _Token
    ) -> tuple[Compare, _Operand]:
        """Return the comparison with the record's side on the left, and the right operand as it was written."""
        one, other = self._operand(left, start), self._operand(operand(), right_start)
        if isinstance(one, Literal):
            one, swapped, sign = other, one, _FLIPPED[sign]
        else:
            swapped = other
        if isinstance(one, Literal):
            self._fail(start.position, "this compares two literals; name a field")
        if not isinstance(swapped, Literal | Name):
            self._fail(right_start.position, "expected a literal or a field; do arithmetic on one side only")
        return Compare(one, sign, swapped), other

    def _member(self) -> _Node:
        start = self._peek()
        left = self._sum()
        if self._word("is"):
            name = self._name_of(left, start, "is null")
            self._next += 1
            opposite = bool(self._take("not"))
            if not self._word("null"):
                self._refuse("expected 'null'")
            self._next += 1
            return Not(IsNull(name)) if opposite else IsNull(name)
        if self._take("like"):
            return Like(self._name_of(left, start, "like"), self._string("a pattern in quotes"))
        opposite = bool(self._take("not"))
        if opposite and not self._sees("in"):
            self._refuse("expected 'in'; other negations stand before their part: not (…)")
        if self._take("in"):
            found = In(self._name_of(left, start, "in"), self._list())
            return Not(found) if opposite else found
        return left

    def _not(self) -> Tree:
        start = self._peek()
        part = self._unary()
        if not isinstance(part, _PARTS):
            self._fail(start.position, "expected '(': Milvus negates only what is in parentheses")
        return part.part if isinstance(part, Not) else Not(part)

    def _holding(self, part: Callable[[], _Node], start: _Token) -> Tree:
        return self._holds(part(), start)

    def _holds(self, node: _Node, start: _Token) -> Tree:
        if isinstance(node, _PARTS):
            return node
        token = self._peek()
        found = token.text if token.kind == "end" else repr(token.text)
        hint = f"; compare a field of truth values: {node.name} == true" if isinstance(node, Name) else ""
        return self._fail(token.position, f"expected a comparison, 'in', 'like' or 'is null', found {found}{hint}")

    # --- values -------------------------------------------------------------------------------------------------------

    def _sum(self) -> _Node:
        return self._computed(self._product, "+", "-")

    def _product(self) -> _Node:
        return self._computed(self._unary, "*", "/", "%")

    def _computed(self, operand: Callable[[], _Node], *signs: str) -> _Node:
        start = self._peek()
        found = operand()
        while sign := self._take(*signs):
            right_start = self._peek()
            one, other = self._operand(found, start), self._operand(operand(), right_start)
            found = self._arithmetic(one, sign, other, start, right_start)
        return found

    def _arithmetic(self, one: _Operand, sign: str, other: _Operand, start: _Token, right_start: _Token) -> _Operand:
        if isinstance(one, Literal) and not isinstance(other, Literal) and sign in "+*":
            one, other, start, right_start = other, one, right_start, start
        if not isinstance(other, int | float) or isinstance(other, bool):
            self._fail(right_start.position, f"{sign!r} takes a field and then a number, and nothing else")
        if sign in "/%" and other == 0:
            self._fail(right_start.position, "nothing can be divided by zero")
        if isinstance(one, Name):
            return Arithmetic(one, sign, other)
        if not isinstance(one, int | float) or isinstance(one, bool):
            self._fail(start.position, f"{sign!r} takes a field and then a number, and nothing else")
        return self._number(computed(one, sign, other), start)

    def _unary(self) -> _Node:
        if not (sign := self._take("+", "-", "not", "!")):
            return self._power()
        if sign in ("not", "!"):
            return self._deeper(self._not)
        start = self._peek()
        value = self._deeper(self._unary)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._fail(start.position, f"expected a number after {sign!r}: only numbers have a sign")
        return -value if sign == "-" else value

    def _power(self) -> _Node:
        """Read powers from the left, as Milvus does: `2 ** 3 ** 2` is 64."""
        start = self._peek()
        base = self._primary()
        while self._take("**"):
            exponent = self._deeper(self._unary) if self._peek().text in ("+", "-") else self._primary()
            if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (base, exponent)):
                self._fail(start.position, "'**' takes numbers only, no fields")
            try:
                base = self._number(math.pow(cast(float, base), cast(float, exponent)), start)
            except (OverflowError, ValueError):
                self._fail(start.position, "this power is not a finite number")
        return base

    def _primary(self) -> _Node:
        token = self._peek()
        if token.kind in ("string", "number") or (token.kind == "key" and token.text in ("true", "false")):
            return self._literal()
        if self._take("("):
            found = self._deeper(self._or)
            self._expect(")")
            return found
        if token.kind != "word":
            self._refuse("expected a field or a literal")
        if token.text.lower() == "exists" and self._tokens[self._next + 1].kind == "word":
            self._next += 1
            return Not(IsNull(self._name(), asked="exists"))
        if self._tokens[self._next + 1].text == "(" and token.text != _META:
            return self._function(token)
        return self._name()

    def _function(self, token: _Token) -> _Node:
        function = token.text.lower()
        if function.lower() == "exists":
            self._fail(token.position, "expected a field after 'exists', without parentheses")
        if function != "array_length" and function not in _CONTAINS:
            known = ", ".join(["array_length", *_CONTAINS])
            self._fail(token.position, f"there is no function {token.text!r} here; there are {known}")
        self._next += 2
        name = self._name()
        found: _Node = Length(name)
        if which := _CONTAINS.get(function):
            self._expect(",")
            start = self._peek()
            values = (self._value(),) if which == "one" else self._list()
            if not values:
                self._fail(start.position, "the list is empty; name a value")
            found = Contains(name, which, values)
        self._expect(")")
        return found

    def _name(self) -> Name:
        token = self._peek()
        if token.kind != "word":
            self._refuse("expected the name of a field")
        self._next += 1
        path: list[str | int] = []
        while self._take("["):
            step = self._peek()
            if step.kind == "string":
                path.append(self._string("a key"))
            elif step.kind == "number" and re.fullmatch(r"0|[1-9][0-9]{0,8}", step.text):
                self._next += 1
                path.append(int(step.text))
            else:
                self._refuse("expected a key in quotes or the number of an element")
            self._expect("]")
        if token.text != _META:
            return Name(token.text, tuple(path), position=token.position)
        if not path or not isinstance(path[0], str):
            self._fail(token.position, 'expected a field: $meta["name"]')
        return Name(path[0], tuple(path[1:]), meta=True, position=token.position)

    def _list(self) -> tuple[Literal, ...]:
        self._expect("[")
        values: list[Literal] = []
        while not self._take("]"):
            values.append(self._value())
            if not self._sees("]"):
                self._expect(",")
        return tuple(values)

    def _value(self) -> Literal:
        start = self._peek()
        if self._sees("]", "["):
            self._refuse("expected a literal")
        value = self._sum()
        if not isinstance(value, Literal):
            self._fail(start.position, f"expected a literal, found {start.text!r}; quote texts")
        return value

    def _literal(self) -> Literal:
        token = self._peek()
        if token.kind == "string":
            return self._string("a text")
        self._next += 1
        if token.kind == "key":
            return token.text == "true"
        if re.match("0[xXbB]", token.text):
            return int(token.text, 0)
        if not token.text.isdigit():
            return self._number(float(token.text), token)
        if token.text[0] == "0" and token.text != "0":
            self._fail(token.position, "engines read a number with a leading zero differently; write it without the zero")
        if len(token.text) > 100:
            self._fail(token.position, "this number is too long; Milvus has whole numbers of 64 bits")
        return int(token.text)

    def _number(self, value: int | float, token: _Token) -> int | float:
        if isinstance(value, int):
            if value.bit_length() > 256:
                self._fail(token.position, "this number is too large; Milvus has whole numbers of 64 bits")
        elif not math.isfinite(value):
            self._fail(token.position, "this number is not finite")
        return value

    def _string(self, what: str) -> str:
        token = self._peek()
        if token.kind != "string":
            self._refuse(f"expected {what}")
        self._next += 1

        def character(match: re.Match[str]) -> str:
            body, position = match[1], token.position + match.start() + 1
            if body in _UNESCAPED:
                return _UNESCAPED[body]
            code = int(body, 8) if body[0] in "01234567" else int(body[1:], 16) if len(body) > 1 else -1
            if code < 0:
                self._fail(position, f"the escape {match[0]!r} is not known; write a backslash twice")
            if code > (0x7F if body[0] not in "uU" else 0x10FFFF) or 0xD800 <= code <= 0xDFFF:
                self._fail(position, f"the escape {match[0]!r} does not name a character; write the character itself")
            return chr(code)

        return _ESCAPE.sub(character, token.text[1:-1])

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        tokens, position, text = [], 0, self._text.rstrip(" \t\r\n")
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                self._unreadable(re.compile(r"[ \t\r\n]*").match(text, position).end())  # type: ignore[union-attr]
            kind = str(match.lastgroup)
            token = _Token(kind, match[kind], match.start(kind))
            if kind == "word" and token.text.lower() in _KEYS:
                token = _Token("key", token.text.lower(), token.position)
            if kind == "string" and any("\ud800" <= character <= "\udfff" for character in token.text):
                self._fail(token.position, "half of a surrogate pair is not a character; write the character itself")
            tokens.append(token)
            position = match.end()
        return [*tokens, _Token("end", "the end", len(text))]

    def _unreadable(self, position: int) -> NoReturn:
        character = self._text[position]
        if character in "'\"":
            self._fail(position, f"{character!r} opens a text that is not closed")
        if word := re.compile(r"[^\W\d]\w*").match(self._text, position):
            self._fail(position, f'{word[0]!r} cannot stand here; write $meta["{word[0]}"] for a field of such a name')
        hint = {
            "=": "; write == for 'equal'",
            ";": "; one filter at a time",
            "&": "; write && or 'and'",
            "|": "; write || or 'or'",
        }
        self._fail(position, f"{character!r} cannot stand here{hint.get(character, '')}")

    def _operand(self, node: _Node, start: _Token) -> _Operand:
        if isinstance(node, _PARTS):
            self._fail(start.position, "expected a field or a literal, found a comparison; join comparisons by 'and'")
        return node

    def _name_of(self, node: _Node, start: _Token, what: str) -> Name:
        if not isinstance(node, Name):
            self._fail(start.position, f"expected a field before {what!r}")
        return node

    def _deeper(self, rule: Callable[[], _Node]) -> _Node:
        self._depth += 1
        if self._depth > DEEPEST:
            self._fail(self._peek().position, f"this is nested more than {DEEPEST} levels deep; write it flatter")
        found = rule()
        self._depth -= 1
        return found

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _word(self, text: str) -> bool:
        """Return whether the next word is this one, which is a keyword only here."""
        token = self._peek()
        return token.kind == "word" and token.text.lower() == text

    def _sees(self, *texts: str) -> bool:
        token = self._peek()
        return token.kind in ("key", "sign") and token.text in texts

    def _take(self, *texts: str) -> str:
        if not self._sees(*texts):
            return ""
        self._next += 1
        return self._tokens[self._next - 1].text

    def _expect(self, text: str) -> None:
        if not self._take(text):
            self._refuse(f"expected {text!r}")

    def _refuse(self, wanted: str) -> NoReturn:
        token = self._peek()
        self._fail(token.position, f"{wanted}, found {token.text if token.kind == 'end' else repr(token.text[:60])}")

    def _fail(self, position: int, reason: str) -> NoReturn:
        refuse(self._text, position, reason)


def computed(one: int | float, sign: str, other: int | float) -> int | float:
    """Compute as Milvus does: whole numbers are divided as in C, towards zero; a remainder has the dividend's sign."""
    if sign in "/%" and isinstance(one, int) and isinstance(other, int):
        quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
        return quotient if sign == "/" else one - other * quotient
    try:
        match sign:
            case "+":
                return one + other
            case "-":
                return one - other
            case "*":
                return one * other
            case "/":
                return one / other
            case _:
                return math.fmod(one, other)
    except (OverflowError, ValueError):  # a whole number too large for a float, or a remainder of infinity
        return math.nan
