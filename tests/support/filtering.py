"""Records and filters at random: every type of field, missing values, nulls, values of other kinds, the whole grammar."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rmvdb.engines.filters import literal
from rmvdb.types import Field, IdType, Metric, Schema

FIELDS = (
    Field(name="n", type="INT64"),
    Field(name="small", type="INT8"),
    Field(name="city", type="VARCHAR", params={"max_length": 200}),
    Field(name="share", type="FLOAT"),
    Field(name="exact", type="DOUBLE"),
    Field(name="good", type="BOOL"),
    Field(name="tags", type="ARRAY", params={"element_type": "VARCHAR", "max_capacity": 8, "max_length": 64}),
    Field(name="nums", type="ARRAY", params={"element_type": "INT64", "max_capacity": 8}),
    Field(name="note", type="JSON"),
)
SCHEMA = Schema(collection="c", dim=4, metric=Metric.L2, id_type=IdType.INT64, fields=FIELDS)

TEXTS = ("", "a", "b", "ab", "a%b", "a_b", "aüb", "a.b", "B", "it's", 'say "a"', "a\\b", "a\nb", "a\tb", "and (", "1", "true")
WHOLE = (-7, -2, -1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**53 + 1, 2**62)
REAL = (-1.5, 0.0, 0.1, 0.5, 1.0, 2.0, 1e-3, 1e10, 16777217.0)
PATTERNS = (
    "a%",
    "%b",
    "%a%",
    "a%b",
    "a_b",
    "_",
    "%",
    "a",
    "",
    "a\\%b",
    "a\\_%",
    "\\\\%",
    "%.%",
    "it's%",
    "a\n%",
    "B%",
    "%%",
    "a%%",
)

_VALUES = st.sampled_from([*TEXTS, *WHOLE, *REAL, True, False, None])
_JSON = st.one_of(
    _VALUES, st.lists(_VALUES, max_size=3), st.fixed_dictionaries({}, optional={"a": _VALUES, "0": _VALUES, "k y": _VALUES})
)
RECORDS = st.fixed_dictionaries(
    {
        "n": st.sampled_from([*WHOLE, -(2**63) + 1, 2**63 - 2]),
        "small": st.integers(-128, 127),
        "city": st.sampled_from(TEXTS),
        "share": st.sampled_from(REAL),
        "exact": st.sampled_from(REAL),
        "good": st.booleans(),
        "tags": st.lists(st.sampled_from(TEXTS), max_size=3),
        "nums": st.lists(st.sampled_from(WHOLE), max_size=3),
        "note": st.fixed_dictionaries({}, optional={"a": _JSON, "k y": _JSON, "l": st.lists(_JSON, max_size=3)}),
    },
    optional={"x": _JSON, "y": _JSON, "größe": _JSON},
)

_LITERALS = {
    "n": WHOLE,
    "small": (-200, -2, -1, 0, 1, 2, 7, 300),
    "id": (-1, 0, 1, 3, 5),
    "city": TEXTS,
    "share": (*REAL, 0, 1, 2),
    "exact": (*REAL, 0, 1, 2),
    "good": (True, False),
    "tags[0]": TEXTS,
    "nums[1]": WHOLE,
}
_OPEN = ("x", "y", "zzz", '$meta["x"]', '$meta["größe"]', '$meta["n"]', 'x["a"]', "x[0]", 'x["0"]', 'note["a"]')
_OPEN += ('note["k y"]["a"]', 'note["l"][0]', 'note["l"][1]["a"]')
_LITERALS |= dict.fromkeys(_OPEN, (*TEXTS, *WHOLE, *REAL, True, False))
_NUMBERS = ("n", "small", "exact", "share", "x", 'note["a"]')
_SIGNS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])


def _written(value: Any) -> str:
    return literal(value)


@st.composite
def _comparison(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(_LITERALS)))
    one, other = (_written(draw(st.sampled_from(_LITERALS[name]))) for _ in range(2))
    sign = draw(_SIGNS)
    forms = [f"{name} {sign} {one}", f"{one} {sign} {name}", f"{one} < {name} <= {other}", f"{one} >= {name} > {other}"]
    return draw(st.sampled_from(forms))


@st.composite
def _list(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(_LITERALS)))
    values = draw(st.lists(st.sampled_from(_LITERALS[name]), max_size=4))
    return f"{name} {draw(st.sampled_from(['in', 'not in', 'IN']))} [{', '.join(map(_written, values))}]"


@st.composite
def _arithmetic(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(_NUMBERS))
    signs = ["+", "-", "*", "/"] + ["%"] * (name not in ("exact", "share"))
    whole = name not in ("exact", "share")
    by = draw(st.sampled_from([-3, -1, 1, 2, 3, 7, 2**40] if whole else [0.5, -2.0, 3]))
    value = draw(st.sampled_from(WHOLE if whole else REAL))
    return f"{name} {draw(st.sampled_from(signs))} {_written(by)} {draw(_SIGNS)} {_written(value)}"


@st.composite
def _contains(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(["tags", "nums", "x", "note", 'note["a"]', 'note["l"]', '$meta["größe"]']))
    kind = draw(st.sampled_from(["array", "json", "ARRAY"]))
    values = [
        *map(
            _written,
            draw(
                st.lists(
                    st.sampled_from(_LITERALS.get(f"{name}[0]", _LITERALS.get(f"{name}[1]", _LITERALS["x"]))),
                    min_size=1,
                    max_size=3,
                )
            ),
        )
    ]
    which = draw(st.sampled_from(["", "_all", "_any"]))
    function = f"{kind}_contains{which}" if kind.islower() else f"{kind}_CONTAINS{which.upper()}"
    return f"{function}({name}, {'[' + ', '.join(values) + ']' if which else values[0]})"


_OTHERS = st.one_of(
    st.builds("{} like {}".format, st.sampled_from(["city", "tags[0]", *_OPEN]), st.sampled_from(PATTERNS).map(_written)),
    st.builds("exists {}".format, st.sampled_from(_OPEN)),
    st.builds("{} is {}null".format, st.sampled_from(["n", "city", "nums[1]", *_OPEN]), st.sampled_from(["", "not "])),
    st.builds("array_length({}) {} {}".format, st.sampled_from(["tags", "nums", "x", 'note["l"]']), _SIGNS, st.integers(0, 3)),
    st.builds("{} {} {}".format, st.sampled_from(["n", "small", "id"]), _SIGNS, st.sampled_from(["n", "small", "exact"])),
    st.builds("share {} {}".format, _SIGNS, st.sampled_from(["exact", "share"])),
)
#: Filters that fit `SCHEMA`.
FILTERS = st.recursive(
    st.one_of(_comparison(), _comparison(), _list(), _arithmetic(), _contains(), _OTHERS),
    lambda inner: (
        st.builds("{}({})".format, st.sampled_from(["not ", "!", "NOT "]), inner)
        | st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or", "AND", "OR", "&&", "||"]), inner)
        | st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner)
    ),
    max_leaves=5,
)
_SIGNS_AND_WORDS = "n x city 1 2.5 -1 'a' == != < in not and or AND OR && || ! ( ) [ ] , ; + % / ** like is null exists true"
_SCRAPS = _SIGNS_AND_WORDS.split()
_SCRAPS += ["$meta", ".", "\\", "ü", "[1]", "n == 1", "not in", "(n == 1)", "x[0]", 'x["a"]', "array_contains(nums, 1)", "\n"]
_SCRAPS += ["\0", '"b"', "'", "//", "--", "0x"]
#: Texts that are hardly ever a filter.
SCRAPS = st.one_of(
    st.lists(st.sampled_from(_SCRAPS), max_size=8).map(" ".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
