"""A filter as a tree. Every node is a frozen value; two filters that say the same thing in other words are equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Literal: TypeAlias = bool | int | float | str

#: The type of a value that only the record knows: inside a JSON field, or in a field that the schema doesn't declare.
OPEN = "JSON"


@dataclass(frozen=True, slots=True)
class Name:
    """A field, an element of an ARRAY, or a place inside JSON."""

    name: str
    path: tuple[str | int, ...] = ()
    #: Whether it is a field that the schema doesn't declare: `$meta["name"]`.
    meta: bool = False
    #: The type of the value in Milvus' words, "" until the tree is bound to a schema.
    type: str = ""
    #: The type of the elements, where the value is an ARRAY.
    element: str = ""
    #: Whether a record may have no value here, so that a comparison with it is neither true nor false.
    nullable: bool = False
    #: Whether no record has it: `$meta["name"]` of a field that the schema declares.
    absent: bool = False
    #: Where it stands in the text.
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
    """A number of the record, and what is done with it: `name + value`. The sign is one of + - * / %."""

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
    """Whether a list holds the value ("one"), every value ("all") or at least one of them ("any")."""

    name: Name
    which: str
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """Whether a text fits a pattern: `%` stands for any characters, `_` for one, a backslash before them for themselves."""

    name: Name
    pattern: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether a record has no value there: none, or null."""

    name: Name
    #: Whether it was asked by `exists`, which only a place in JSON allows. The negation is a `Not`.
    asked: str = field(default="is null", compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite; where the part is neither true nor false, the opposite is neither."""

    part: Tree


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """At least one part holds."""

    parts: tuple[Tree, ...]


Tree: TypeAlias = Compare | In | Contains | Like | IsNull | Not | All | Any
#: What holds for every record.
EVERY = All(())
