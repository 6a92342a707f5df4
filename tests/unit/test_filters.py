"""Filters: what they mean, how they are refused, and that any value can be written into one and read back."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmvdb.errors import FilterError, Mismatch
from rmvdb.filters import INT64_BOUNDS, between, both, checked_id, closed, ids_in, literal, parse, without_not
from rmvdb.types import Field, IdType, Metric, Schema

RECORD = {"id": 7, "n": 3, "x": 2.5, "city": "Zürich", "good": True, "none": None, "tags": ["a"], "empty": ""}
HOLD = [
    "",
    "   ",
    "n == 3",
    "n==3",
    "(n == 3)",
    "((n == 3))",
    "n != 4",
    "n < 4 and n <= 3 and n > 2 and n >= 3",
    "n == 3.0",
    "x > 2",
    "x < 2.6e0",
    "x == +2.5",
    "n > - 1",
    "3 == n",
    "2 < n",
    "4 > n",
    "-1 <= n",
    "n in [1, 2, 3]",
    "n in [1, 2, 3,]",
    "n not in [1, 2]",
    "n not in []",
    "city == 'Zürich'",
    'city in ["Bern", "Zürich"]',
    "city > 'Z' && city < 'a'",
    "good == true",
    "good != False",
    "true == good",
    "n == 1 or n == 3",
    "n == 1 || good == TRUE",
    "n == 1 and n == 2 or n == 3",
    "n == 3 or n == 1 and n == 2",
    "not (n == 4)",
    "!(n == 4)",
    "NOT (n == 4) AND n == 3 OR n IN [9]",
    "not (n == 4 or n == 5) and not (good == false)",
    "missing != 1",
    "missing not in [1]",
    "not (missing == 1)",
    "city != 1",
    "good != 1",
    "n != true",
    "n not in [true]",
    "tags != 'a'",
    "empty == ''",
    "\n n \t == \n 3 ",
    "notable != 1 and island != 2 and order != 3",
]
FAIL = [
    "n == 4",
    "n in []",
    "n in [4]",
    "n not in [3]",
    "n == '3'",
    "city == 3",
    "good == 1",
    "n in [true, '3']",
    "missing == 1",
    "missing < 1",
    "missing > 1",
    "missing in [1]",
    "none == 1",
    "none != 1",
    "none in [1]",
    "none not in [1]",
    "tags == 'a'",
    "tags in ['a']",
    "city < 3",
    "(n == 3 or good == true) and n == 4",
    "not (n == 3)",
]
REFUSED = {
    "n ==": (4, "expected a literal, found the end"),
    "n = 3": (2, "'=' cannot stand here"),
    "n <> 3": (3, "expected a literal, found '>'"),
    "n === 3": (4, "'=' cannot stand here"),
    "== 3": (0, "expected a field or a literal, found '=='"),
    "n == 3 and": (10, "expected a field or a literal, found the end"),
    "n == 3 n == 4": (7, "expected 'and', 'or' or the end, found 'n'"),
    "n": (
        1,
        "expected a comparison, 'in' or 'not in'; functions, 'like', paths and arithmetic are left to Milvus, found the end",
    ),
    "city like 'Z%'": (5, "expected a comparison, 'in' or 'not in'"),
    "json_contains(tags, 'a')": (13, "expected a comparison"),
    "n + 1 == 4": (2, "expected a comparison"),
    "n % 2 == 0": (2, "'%' cannot stand here"),
    "doc['a'] == 1": (3, "expected a comparison"),
    "$meta['a'] == 1": (0, "'$' cannot stand here"),
    "n == m": (5, "expected a literal, found 'm'"),
    "1 == 1": (5, "expected the name of a field, found '1'"),
    "0 < n < 5": (6, "expected 'and', 'or' or the end, found '<'"),
    "not n == 3": (4, "expected '(': Milvus negates only what is in parentheses, found 'n'"),
    "not n in [3]": (4, "expected '(': Milvus negates only what is in parentheses"),
    "(n == 3": (7, "expected ')', found the end"),
    "n == 3)": (6, "expected 'and', 'or' or the end, found ')'"),
    "n in 3": (5, "expected '[', found '3'"),
    "n in (3)": (5, "expected '[', found '('"),
    "n in [3 4]": (8, "expected ',', found '4'"),
    "n in [m]": (6, "expected a literal or ']', found 'm'"),
    "n not 3": (6, "expected 'in', found '3'"),
    "city == 'Z": (8, '"\'" cannot stand here'),
    "city == 'Z\n'": (8, '"\'" cannot stand here'),
    r"city == '\q'": (9, r"the escape '\\q' is not known"),
    "n == 3x": (5, "'3' cannot stand here"),
    "true": (4, "expected a comparison"),
    "n == 3 and ()": (12, "expected a field or a literal, found ')'"),
}


@pytest.mark.parametrize("text", HOLD)
def test_a_filter_holds(text: str) -> None:
    assert parse(text)(RECORD) is True


@pytest.mark.parametrize("text", FAIL)
def test_a_filter_does_not_hold(text: str) -> None:
    assert parse(text)(RECORD) is False


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_understood_is_named_with_its_position(text: str) -> None:
    position, reason = REFUSED[text]
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"The filter {text!r} cannot be understood at position {position}: {reason}")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"'it\'s'", "it's"),
        (r'"say \"hi\""', 'say "hi"'),
        (r"'back\\slash'", "back\\slash"),
        (r"'line\nend\r\t'", "line\nend\r\t"),
        (r"'\x41\u00e9'", "Aé"),
        ("'\"'", '"'),
        ('"\'"', "'"),
        ("'and (or] not in'", "and (or] not in"),
    ],
)
def test_escapes_are_read(written: str, meant: str) -> None:
    assert parse(f"city == {written}")({"city": meant})


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(INT64_BOUNDS[0] + 1, INT64_BOUNDS[1] - 1)
VALUES = TEXT | NUMBERS | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)


@given(value=VALUES, other=VALUES)
def test_any_value_can_be_written_and_read_back(value: Any, other: Any) -> None:
    same = value == other and isinstance(value, bool) is isinstance(other, bool)
    assert parse(f"f == {literal(value)}")({"f": value})
    assert parse(f"f == {literal(value)}")({"f": other}) is same
    assert parse(f"f in [{literal(other)}, {literal(value)}]")({"f": value})
    assert closed(f"f == {literal(value)}") == f"f == {literal(value)}"


@given(ids=st.lists(TEXT, min_size=1) | st.lists(NUMBERS, min_size=1), more=st.lists(TEXT))
def test_exactly_the_ids_that_were_written_are_in_the_list(ids: list[Any], more: list[str]) -> None:
    test = parse(ids_in("id", ids))
    assert all(test({"id": id}) for id in ids)
    assert [id for id in more if test({"id": id})] == [id for id in more if id in ids]


@given(low=NUMBERS, high=NUMBERS, id=NUMBERS)
def test_a_range_leaves_its_lower_end_out(low: int, high: int, id: int) -> None:
    assert parse(between("id", low, high))({"id": id}) is (low < id <= high)
    assert parse(between("id", None, high))({"id": id}) is (id <= high)
    assert parse(between("id", low, None))({"id": id}) is (low < id)
    assert between("id", None, None) == ""


def test_two_filters_are_joined_as_they_were_meant() -> None:
    assert both("", "") == ""
    assert both("a == 1", "") == both("", "a == 1") == "a == 1"
    assert parse(both("a == 1 or a == 2", "b == 1 or b == 2"))({"a": 1, "b": 3}) is False


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**80, math.nan, math.inf, -math.inf])
def test_a_value_without_a_form_is_refused(value: float) -> None:
    with pytest.raises(FilterError, match="cannot be written in a filter"):
        literal(value)


@pytest.mark.parametrize(
    "text", ["", " a == 1 ", "(a in [1, 2]) and b == ')'", "a == '(' or b == \"[\"", r"a == '\'(' and (b == 1)", "f(a, [1], 'x')"]
)
def test_closed_filters_pass(text: str) -> None:
    assert closed(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("a == 1) or (b == 2", 6, "')' closes nothing"),
        ("(a == 1", 7, "'(' is not closed"),
        ("a in [1, 2", 10, "'[' is not closed"),
        ("(a in [1)]", 8, "')' closes nothing"),
        ("a == 'it", 5, "the string has no end"),
        (r"a == 'it\'", 5, "the string has no end"),
        ("a == '(' )", 9, "')' closes nothing"),
    ],
)
def test_a_filter_that_would_slip_out_of_what_it_is_joined_with_is_refused(text: str, position: int, reason: str) -> None:
    with pytest.raises(FilterError) as caught:
        closed(text)
    assert str(caught.value).endswith(f"at position {position}: {reason}")


@given(text=st.text("ab=1()[]'\"\\ ,", max_size=12), other=st.integers(0, 1))
def test_a_closed_filter_can_be_joined_whatever_it_says(text: str, other: int) -> None:
    try:
        inner = closed(text)
        parse(inner)
    except FilterError:
        return
    joined = parse(both(inner, "z == 1"))
    assert joined({"z": other}) is (parse(inner)({"z": other}) and other == 1)


COMPARISONS = st.sampled_from(
    [f"{name} {sign} 1" for name in "ab" for sign in ("==", "!=", "<", "<=", ">", ">=")]
    + [f"{name} {verb} [0, 2]" for name in "abc" for verb in ("in", "not in")]
    + ["c == 'x'", "'x' != c", "1 < a"]
)
EXPRESSIONS = st.recursive(
    COMPARISONS,
    lambda inner: (
        st.builds("not ({})".format, inner)
        | st.builds("!({})".format, inner)
        | st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or", "&&", "||"]), inner)
    ),
    max_leaves=6,
)
HELD = Schema(
    collection="c",
    dim=2,
    metric=Metric.L2,
    id_type=IdType.INT64,
    fields=(Field(name="a", type="INT64"), Field(name="b", type="INT8")),
)


@given(
    text=EXPRESSIONS,
    record=st.fixed_dictionaries(
        {"a": st.integers(0, 2), "b": st.integers(0, 2)}, optional={"c": st.integers(0, 2) | st.just("x")}
    ),
)
def test_a_filter_without_its_negations_says_the_same(text: str, record: dict[str, Any]) -> None:
    turned = without_not(text, HELD)
    assert not re.search(r"not \(|!(?!=)", turned)
    assert parse(turned)(record) is parse(text)(record)


@pytest.mark.parametrize(
    "text", ["", "a == 1", "a not in [1] and b != 2", "c like 'not (%'", "c == 'a\\' !(x'", 'a["not ("] == 1']
)
def test_a_filter_without_a_negation_is_left_as_it_is(text: str) -> None:
    assert without_not(text, HELD) == text


@pytest.mark.parametrize("text", ["not (c < 1)", "not (c like 'x%')", "not exists c", "not (a < c)"])
def test_a_negation_that_cannot_be_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(FilterError, match=r"; Milvus Lite 2.5 has no `not \(…\)`: write the opposite comparison$"):
        without_not(text, HELD)


def test_ids_are_taken_as_the_collection_keeps_them() -> None:
    numbers = Schema(collection="c", dim=2, metric=Metric.L2, id_type=IdType.INT64)
    texts = Schema(collection="c", dim=2, metric=Metric.L2, id_type=IdType.VARCHAR)
    assert (checked_id(np.int64(3), numbers), type(checked_id(np.int32(3), numbers))) == (3, int)
    assert (checked_id(np.str_("a"), texts), type(checked_id(np.str_("a"), texts))) == ("a", str)
    for id, schema in ((1, texts), ("1", numbers), (True, numbers), (1.0, numbers), (None, texts)):
        with pytest.raises(Mismatch, match=f"'c' has ids of type {schema.id_type.value}"):
            checked_id(id, schema)
    for edge in INT64_BOUNDS:
        with pytest.raises(Mismatch, match=f"The id {edge} cannot be served"):
            checked_id(edge, numbers)
