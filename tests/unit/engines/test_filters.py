"""Filters: what they mean, how they are refused, and that any value can be written into one and read back."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rmvdb.engines import filters
from rmvdb.engines.filters import INT64_BOUNDS, LITE_2, LITE_3, MILVUS, MILVUS_2_3, between, both, ids_in, literal, write
from rmvdb.engines.filters import parse as tree_of
from rmvdb.engines.filters.evaluate import pieces
from rmvdb.errors import FilterError, UsageError
from rmvdb.types import Field, IdType, Metric, Schema
from tests.support import filtering
from tests.support.spelled import spelled

#: Nothing but undeclared fields.
OPEN = Schema(collection="c", dim=2, metric=Metric.L2, id_type=IdType.INT64)

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
    "none != 1",
    "none not in [1]",
    "n in [0x3, 0b11]",
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
    "none in [1]",
    "tags == 'a'",
    "tags in ['a']",
    "city < 3",
    "(n == 3 or good == true) and n == 4",
    "not (n == 3)",
]
REFUSED = {
    "n ==": (4, "expected a field or a literal, found the end"),
    "n = 3": (2, "'=' cannot stand here; write =="),
    "n <> 3": (3, "expected a field or a literal, found '>'"),
    "n === 3": (4, "'=' cannot stand here"),
    "== 3": (0, "expected a field or a literal, found '=='"),
    "n == 3 and": (10, "expected a field or a literal, found the end"),
    "n == 3 n == 4": (7, "expected 'and', 'or' or the end, found 'n'"),
    "n == 3; m == 4": (6, "';' cannot stand here; one filter at a time"),
    "n": (
        1,
        "expected a comparison, 'in', 'like' or 'is null', found the end; compare a field of truth values: n == true",
    ),
    "n + 1": (5, "expected a comparison, 'in', 'like' or 'is null', found the end"),
    "n == m": (5, "m cannot be compared with another field, because the schema does not say what it is"),
    "n == null": (5, "null cannot be compared; write `is null`"),
    "1 == 1": (0, "this compares two literals; name a field"),
    "1 < n > 5": (6, "'>' cannot follow here; join two comparisons by 'and'"),
    "1 < 2 < n": (0, "this compares two literals"),
    "n == 3 == true": (7, "expected 'and', 'or' or the end, found '=='"),
    "(n == 3) == true": (0, "expected a field or a literal, found a comparison"),
    "not n == 3": (4, "expected '(': Milvus negates only what is in parentheses"),
    "not n in [3]": (4, "expected '(': Milvus negates only what is in parentheses"),
    "(n == 3": (7, "expected ')', found the end"),
    "n == 3)": (6, "expected 'and', 'or' or the end, found ')'"),
    "a == 1) or (b == 2": (6, "expected 'and', 'or' or the end, found ')'"),
    "n in 3": (5, "expected '[', found '3'"),
    "n in (3)": (5, "expected '[', found '('"),
    "n in [3 4]": (8, "expected ',', found '4'"),
    "n in [m]": (6, "expected a literal, found 'm'; quote texts"),
    "n in [[1]]": (6, "expected a literal, found '['"),
    "n not 3": (6, "expected 'in'"),
    "city not like 'a'": (9, "expected 'in'; other negations stand before their part: not (…)"),
    "city == 'Z": (8, '"\'" opens a text that is not closed'),
    "city == 'Z\n'": (8, '"\'" opens a text that is not closed'),
    r"city == '\q'": (9, r"the escape '\\q' is not known; write a backslash twice"),
    r"city == '\xe9'": (9, "the escape"),
    r"city == '\ud800'": (9, "the escape"),
    "city == '\ud800'": (8, "half of a surrogate pair is not a character"),
    "n == 3x": (5, "'3' cannot stand here"),
    "n == 03": (5, "engines read a number with a leading zero differently"),
    "n == 1e999": (5, "this number is not finite"),
    "n == 9223372036854775807": (0, "9223372036854775807 is compared with n; Milvus reads whole numbers between"),
    "n < -9223372036854775808": (0, "-9223372036854775808 is compared with n; Milvus reads whole numbers between"),
    "true": (4, "expected a comparison"),
    "n == 3 and ()": (12, "expected a field or a literal, found ')'"),
    "größe == 1": (0, "'größe' cannot stand here; write $meta[\"größe\"]"),
    "$meta == 1": (0, 'expected a field: $meta["name"]'),
    "n[-1] == 1": (2, "expected a key in quotes or the number of an element, found '-'"),
    "n % 0 == 1": (4, "nothing can be divided by zero"),
    "n / 0.0 == 1": (4, "nothing can be divided by zero"),
    "n % (2 - 2) == 1": (4, "nothing can be divided by zero"),
    "n == 1 / 0": (9, "nothing can be divided by zero"),
    "n + m == 1": (4, "'+' takes a field and then a number"),
    "2 - n == 1": (4, "'-' takes a field and then a number"),
    "n + 'a' == 1": (4, "'+' takes a field and then a number"),
    "-n == 1": (1, "expected a number after '-': only numbers have a sign"),
    "n ** 2 == 4": (0, "'**' takes numbers only, no fields"),
    "n == 10 ** 999": (5, "this power is not a finite number"),
    "n == n + 1": (5, "expected a literal or a field; do arithmetic on one side only"),
    "n + 1 in [2]": (0, "expected a field before 'in'"),
    "'a' like 'a%'": (0, "expected a field before 'like'"),
    "city like b": (10, "expected a pattern in quotes, found 'b'"),
    "n is 3": (5, "expected 'null', found '3'"),
    "text_match(city, 'a')": (0, "there is no function 'text_match' here; there are array_length, array_contains"),
    "json_contains(tags)": (18, "expected ',', found ')'"),
    "json_contains_all(tags, 1)": (24, "expected '[', found '1'"),
    "json_contains_any(tags, [])": (24, "the list is empty; name a value"),
    "id & 1 == 1": (3, "'&' cannot stand here; write && or 'and'"),
    "(" * 10_000 + "n == 1" + ")" * 10_000: (33, "this is nested more than 32 levels deep; write it flatter"),
    "not " * 10_000 + "(n == 1)": (132, "this is nested more than 32 levels deep"),
    "n == " + "-" * 10_000 + "1": (38, "this is nested more than 32 levels deep"),
}


def parse(text: str, schema: Schema = OPEN) -> Any:
    return filters.holds(filters.read(text, schema))


@pytest.mark.parametrize("text", HOLD)
def test_a_filter_holds(text: str) -> None:
    assert parse(text)(RECORD) is True


@pytest.mark.parametrize("text", FAIL)
def test_a_filter_does_not_hold(text: str) -> None:
    assert parse(text)(RECORD) is False


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode())
def test_a_part_that_is_not_understood_is_named_with_its_position(text: str) -> None:
    position, reason = REFUSED[text]
    with pytest.raises(FilterError) as caught:
        filters.read(text, OPEN)
    assert str(caught.value).startswith(f"The filter {filters.shown(text)} cannot be understood at position {position}: {reason}")


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


@given(ids=st.lists(TEXT, min_size=1) | st.lists(NUMBERS, min_size=1), more=st.lists(TEXT))
def test_exactly_the_ids_that_were_written_are_in_the_list(ids: list[Any], more: list[str]) -> None:
    schema = OPEN if isinstance(ids[0], int) else replace(OPEN, id_type=IdType.VARCHAR)
    test = parse(ids_in("id", ids), schema)
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


FIXED = filtering.SCHEMA
CLOSED = Schema(collection="c", dim=2, metric=Metric.L2, id_type=IdType.VARCHAR, fields=filtering.FIELDS, dynamic=False)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("n == 'x'", 0, "n has whole numbers, not 'x'; compare it with whole numbers"),
        ("n == 3.0", 0, "n has whole numbers, not 3.0"),
        ("n in [1, true]", 0, "n has whole numbers, not true"),
        ("good == 1", 0, "good has true or false, not 1"),
        ("city == 3", 0, "city has texts, not 3"),
        ("n == 1 and city < 3", 11, "city has texts, not 3"),
        ("share == 'x'", 0, "share has numbers, not 'x'"),
        ("share < 1e300", 0, "1e+300 is compared with share, which is FLOAT and cannot hold it"),
        ("nums[0] == 'x'", 0, "nums[0] has whole numbers, not 'x'"),
        ("array_contains(tags, 1)", 15, "tags has texts, not 1"),
        ("tags == 'a'", 0, "tags is an ARRAY; use array_contains(tags, …), array_length(tags) or tags[0]"),
        ("tags['a'] == 'a'", 0, "tags is an ARRAY; name one element by its number, as in tags[0]"),
        ("note == 1", 0, 'note is JSON; name a place in it, as in note["key"]'),
        ("exists note", 7, "'exists' takes a place in JSON, or a field that is not declared; write exists note[\"key\"]"),
        ("exists n", 7, "'exists' takes a place in JSON, or a field that is not declared; write n is null"),
        ("n[0] == 1", 0, "n is INT64 and does not have parts; only JSON and ARRAY do"),
        ("json_contains(n, 1)", 14, "n is INT64 and does not hold a list; only ARRAY and JSON do"),
        ("n like '1%'", 0, "n has whole numbers, and 'like' reads texts"),
        ("city + 1 == 2", 0, "'+' cannot be applied to city, which has texts"),
        ("exact % 2 == 1", 0, "'%' cannot be applied to exact, which has numbers"),
        ("n == city", 0, "n has numbers, city has texts; compare fields of one kind"),
        ("n == nums[0]", 5, "nums[0] cannot be compared with another field"),
        ("array_length(tags) == 1.5", 13, "a length is a whole number, not 1.5"),
        ("vector == 1", 0, "vector holds the vectors, which no filter reads; name another field"),
        ("citty == 'a'", 0, "collection 'c' has no field 'citty'; did you mean 'city'?"),
        (
            "good == tRue or $meta['y'] == 1",
            16,
            "collection 'c' has no field 'y'; there are: city, exact, good, id, n, note, nums, share …",
        ),
    ],
)
def test_a_filter_that_does_not_fit_the_schema_is_refused_as_a_server_does(text: str, position: int, reason: str) -> None:
    with pytest.raises(FilterError) as caught:
        filters.read(text, CLOSED)
    assert str(caught.value).startswith(f"The filter {text!r} cannot be understood at position {position}: {reason}")


@pytest.mark.parametrize("dynamic", [True, False], ids=["with a dynamic field", "without one"])
@pytest.mark.parametrize("text", ["id == 7", "id not in [1, 2, 3]", "not (id > 3)", "id is null", "exists id", "5 < id"])
def test_id_is_refused_in_a_filter_if_the_key_has_another_name(text: str, dynamic: bool) -> None:
    """As a dynamic field, which no record has, `not in` and `not` found every record, and a deletion by them removed it."""
    schema = Schema(collection="c", dim=2, metric=Metric.L2, id_type=IdType.INT64, id_field="number", dynamic=dynamic)
    way_out = 'write number, or $meta["id"] for a dynamic field' if dynamic else "write number"
    with pytest.raises(FilterError, match=re.escape(f"the ids of collection 'c' are in its field 'number'; {way_out}")):
        filters.read(text, schema)
    filters.read(text.replace("id", "number").replace("exists number", "number > 1"), schema)
    if dynamic:
        filters.read(text.replace("id", '$meta["id"]'), schema)


def test_a_missing_filter_is_allowed_and_a_filter_that_is_not_a_text_is_refused() -> None:
    assert filters.read(None, OPEN) == filters.read("", OPEN) == filters.read(" \n", OPEN) == filters.EVERY
    for wrong in (3, ["n == 1"], b"n == 1", {"n": 1}):
        with pytest.raises(UsageError, match=f"filter takes a text such as 'price < 10', not {type(wrong).__name__}"):
            filters.read(wrong, OPEN)


def test_a_filter_that_is_too_long_is_refused_and_thousands_of_parts_are_not() -> None:
    with pytest.raises(FilterError, match=r"has 1,000,007 characters; write at most 1,000,000, and put the rest into another"):
        filters.read(f"n == '{'a' * 1_000_000}'", OPEN)
    chain = filters.read(" and ".join(f"n != {number}" for number in range(5000)), OPEN)
    assert (filters.holds(chain)({"n": 5000}), filters.holds(chain)({"n": 4999})) == (True, False)
    nested = write(chain, LITE_2, OPEN).text
    assert max(itertools.accumulate((sign == "(") - (sign == ")") for sign in nested)) == 13


def test_only_the_tree_of_a_short_filter_is_kept() -> None:
    """The tree of a list of 10,000 ids takes 0.44 MB."""
    short, long = "n in [1, 2, 3]", f"n in [{', '.join(map(str, range(10_000)))}]"
    assert filters.parse(short) is filters.parse(short)
    assert filters.parse(long) is not filters.parse(long)


def test_a_stack_that_is_nearly_used_up_is_no_error_of_ours() -> None:
    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            filters.parse(f"n == {levels} and " + "(" * 30 + "m == 1" + ")" * 30)

    depth = len(inspect.stack())
    with pytest.raises(FilterError, match="nested too deep; write it flatter"):
        down(sys.getrecursionlimit() - depth - 100)


@given(text=filtering.FILTERS)
def test_a_written_filter_is_read_as_the_same_tree(text: str) -> None:
    tree = tree_of(text)
    assert same(tree_of(spelled(tree)), tree)


@given(text=filtering.SCRAPS)
@example("n == 1; n == 2")
@example("n == 1 AND")
@settings(max_examples=500)
def test_whatever_text_is_read_is_read_whole_or_refused(text: str) -> None:
    try:
        tree = filters.read(text, FIXED)
    except FilterError as exc:
        assert "cannot be understood at position" in str(exc)  # noqa: PT017
        return
    if tree != filters.EVERY:
        assert same(tree_of(spelled(tree_of(text))), tree_of(text))


@given(text=filtering.FILTERS, records=st.lists(filtering.RECORDS, min_size=1, max_size=20))
def test_an_engines_filter_misses_nothing_and_says_if_it_adds_records(text: str, records: list[Any]) -> None:
    meant = parse(text, FIXED)
    for dialect in (LITE_2, LITE_3, MILVUS, MILVUS_2_3):
        written = write(filters.read(text, FIXED), dialect, FIXED)
        sent = parse(written.text, FIXED)
        assert dialect is not LITE_2 or not re.search(r"\bnot \(|exists|is null", written.text)
        for number, record in enumerate(records):
            fields = {**record, "id": number}
            assert sent(fields) or not meant(fields)
            assert not written.exact or sent(fields) is meant(fields)


def same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal, and true is not 1 in them."""
    shown = (re.sub(r"position=\d+|asked='[a-z ]+'", "", repr(tree)) for tree in (one, other))
    return one == other and next(shown) == next(shown)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a%", ["\0a", "%"]),
        ("", []),
        (r"\%\_\\_", ["\0%_\\", "_"]),
        ("%%a", ["%", "%", "\0a"]),
        ("a\\", ["\0a\\"]),
        ("\n", ["\0\n"]),
    ],
)
def test_a_pattern_is_taken_apart(pattern: str, found: list[str]) -> None:
    assert pieces(pattern) == found


def test_a_word_without_end_is_not_repeated_whole() -> None:
    with pytest.raises(FilterError) as caught:
        parse("x" * 100_000 + " = 1")
    assert len(str(caught.value)) < 1_200


@pytest.mark.parametrize(("text", "value"), [("n == 2 ** 3 ** 2", 64), ("n == 2 ** -1", 0.5), ("n == -2 ** 2", -4)])
def test_powers_are_taken_from_the_left_as_milvus_does(text: str, value: float) -> None:
    assert tree_of(text) == tree_of(f"n == {value}")


@pytest.mark.parametrize("key", ['a"b', "a\\b", "x][y"])
@pytest.mark.parametrize("dialect", [MILVUS, MILVUS_2_3, LITE_2, LITE_3])
def test_a_key_that_engines_read_otherwise_is_tested_here(key: str, dialect: filters.Dialect) -> None:
    """They take no escape off it, and cut at `][`: `!=` would hold for every record."""
    sent = filters.for_engine(f"$meta[{literal(key)}] != 1", OPEN, dialect)
    assert sent.test is not None
    assert (sent.test({key: 2}), sent.test({key: 1})) == (True, False)


def test_a_number_that_a_float_does_not_tell_from_zero_divides_nothing() -> None:
    share = Field(name="share", type="FLOAT")
    with pytest.raises(FilterError, match="nothing can be divided by zero"):
        filters.read("share / 1e-60 == 1", replace(OPEN, fields=(share,)))
