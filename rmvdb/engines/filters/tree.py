"""A filter as a tree of frozen values; two filters that say the same in other words are equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Literal: TypeAlias = bool | int | float | str

#: The type of a value that only the record tells: inside a JSON field, or in a field that the schema does not declare.
OPEN = "JSON"


@dataclass(frozen=True, slots=True)
class Name:
    """A field, an element of an ARRAY, or a place inside JSON."""

    name: str
    path: tuple[str | int, ...] = ()
    #: Whether the schema does not declare the field: `$meta["name"]`.
    meta: bool = False
    #: The type of the value in Milvus' words, "" until the tree is bound to a schema.
    type: str = ""
    #: The type of the elements, if the value is an ARRAY.
    element: str = ""
    #: Whether a record may lack a value here, so that a comparison with it is neither true nor false.
    nullable: bool = False
    #: Whether every record lacks it: `$meta["name"]` of a field that the schema declares.
    absent: bool = False
    #: Its position in the text.
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        steps = "".join(f"[{part!r}]" for part in self.path)
        return f"{self.name}{steps}"


@dataclass(frozen=True, slots=True)
class Length:
    """The number of elements of an ARRAY or a JSON list."""

    name: Name


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An operation on a number of the record: `name + value`. The sign is one of + - * / %."""

    name: Name
    sign: str
    value: int | float


@dataclass(frozen=True, slots=True)
class Compare:
    """A value of the record, compared with a literal or with another field of it."""

    left: Name | Length | Arithmetic
    #: One of == != < <= > >=.
    sign: str
    right: Literal | Name


@dataclass(frozen=True, slots=True)
class In:
    """Whether a value is one of several literals; a negation of it is a `Not`."""

    name: Name
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Contains:
    """Whether a list has the value ("one"), every value ("all") or at least one of them ("any")."""

    name: Name
    which: str
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """Whether a text fits a pattern: `%` stands for any characters, `_` for one; after a backslash they stand for themselves."""

    name: Name
    pattern: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether a value is missing or null."""

    name: Name
    #: The word of the text. Only a place in JSON allows `exists`, whose node is the `Not` of this one.
    asked: str = field(default="is null", compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite. If the part is neither true nor false, so is the opposite."""

    part: Tree


@dataclass(frozen=True, slots=True)
class All:
    """Every part is true."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """At least one part is true."""

    parts: tuple[Tree, ...]


Tree: TypeAlias = Compare | In | Contains | Like | IsNull | Not | All | Any
#: The tree that is true for every record.
EVERY = All(())
