"""The mark beside a collection, on each engine: of several that take it at once one has it, and it never goes back."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmvdb.engines import lite
from rmvdb.engines.milvus import MilvusStore
from rmvdb.engines.milvus.creating import _make
from rmvdb.engines.milvus.layouts import Layout
from rmvdb.errors import CannotAdopt, CollectionMissing, NotOwner
from rmvdb.protocols import VectorStore
from rmvdb.registry import mark
from rmvdb.registry.mark import Owner, mark_of
from rmvdb.registry.registry import Registry
from tests.support.migrated import migrate
from tests.support.photos import add_gallery, at_once, shape
from tests.support.records import FLAT

#: Rounds of a race, and how many take part in each.
ROUNDS, RACERS = 15, 3


@pytest.fixture
def registries(tmp_path: Path) -> Iterator[Callable[[], Registry]]:
    """Makes registries, each with an identity of its own."""
    made: list[Registry] = []

    def make() -> Registry:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        migrate(f"sqlite:///{folder}/registry.sqlite")
        made.append(Registry(f"sqlite:///{folder}/registry.sqlite"))
        return made[-1]

    yield make
    for registry in made:
        registry.close()


@pytest.fixture
def name(store: VectorStore) -> Iterator[str]:
    """A collection that is not there yet, dropped with its mark after the test."""
    name = f"c_{uuid.uuid4().hex}"
    yield name
    for each in (name, mark_of(name)):
        store.drop(each)


def adopted(registry: Registry, collection: str) -> Registry:
    """Return the registry, with a gallery photos of that collection."""
    add_gallery(registry, schema=dataclasses.replace(shape(), collection=collection))
    return registry


def took(registry: Registry, store: VectorStore, collection: str) -> str:
    """Return the identity of a registry that took the collection, or why it could not."""
    try:
        Owner(registry, store).take("photos", collection)
    except NotOwner as exc:
        return str(exc)
    return registry.identity()


def test_of_several_registries_that_take_a_collection_at_once_one_has_it_and_the_others_hear_where_that_is(
    store: VectorStore, registries: Callable[[], Registry]
) -> None:
    racers = [registries() for _ in range(RACERS)]
    for _ in range(ROUNDS if isinstance(store, MilvusStore) else 3 * ROUNDS):
        collection = f"c_{uuid.uuid4().hex}"
        said = at_once(RACERS, lambda number, collection=collection: took(racers[number], store, collection))
        mark = Owner(racers[0], store).read(collection)
        assert mark is not None
        assert [words for words in said if words == mark.owner] == [mark.owner], said
        winner = next(racer for racer in racers if racer.identity() == mark.owner)
        assert all(winner.shown_url in words for words in said if words != mark.owner), said
        store.drop(mark_of(collection))


def test_a_mark_that_is_half_made_is_made_whole_by_its_owner_and_refused_to_others(
    store: VectorStore, registries: Callable[[], Registry], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mark, "INTRODUCED", 0.2)
    one, two = registries(), registries()
    half = mark._shape(name, one.identity())
    if isinstance(store, MilvusStore):
        _make(store, half, Layout())  # without an index, and not loaded
        with pytest.raises(CannotAdopt):
            store.describe(half.collection)
    else:
        store.create(half, FLAT)

    assert one.identity()[:8] in took(two, store, name)
    assert took(one, store, name) == one.identity()
    assert one.shown_url in took(two, store, name)
    found = Owner(two, store).read(name)
    assert found is not None
    assert (found.owner, found.number) == (one.identity(), 0)


def test_a_mark_is_taken_away_by_its_owner_alone(store: VectorStore, registries: Callable[[], Registry], name: str) -> None:
    one, two = registries(), registries()
    Owner(one, store).take("photos", name)

    Owner(two, store).release(name)
    assert store.exists(mark_of(name))
    Owner(one, store).release(name)
    assert not store.exists(mark_of(name))
    Owner(one, store).release(name)
    assert took(two, store, name) == two.identity()


def test_a_number_that_is_written_beside_the_data_and_given_again_stops_who_has_it(
    store: VectorStore, registries: Callable[[], Registry], name: str
) -> None:
    """As after kill -9 of a database that had acknowledged it and not kept it."""
    registry = adopted(registries(), name)
    one = Owner(registry, store)
    one.settle("photos")
    one.note("photos", registry.raise_trace("photos"))
    one.note("photos", registry.raise_trace("photos"))
    before = one.read(name)
    assert before is not None
    assert before.numbers >= {1, 2}

    registry.catch_up("photos", number=0, epoch=0)
    _set_back(registry, 1)
    with pytest.raises(NotOwner, match="has gone back"):
        one.note("photos", registry.raise_trace("photos"))
    with pytest.raises(NotOwner, match="has gone back"):  # its own next step would have hidden that
        one.note("photos", registry.raise_trace("photos"))
    with pytest.raises(NotOwner, match="has gone back"):
        Owner(registry, store).expect("photos")
    assert one.read(name) == before


def test_a_registry_behind_the_mark_is_refused_by_all_who_look(
    store: VectorStore, registries: Callable[[], Registry], name: str
) -> None:
    registry = adopted(registries(), name)
    one = Owner(registry, store)
    one.settle("photos")
    for _ in range(5):
        one.note("photos", registry.raise_trace("photos"))
    one.expect("photos")

    _set_back(registry, 3)
    for look in (one.expect, one.settle):
        with pytest.raises(NotOwner, match=r"knows of step 3 of gallery 'photos', and step [56] was written") as told:
            look("photos")
        registry.catch_up("photos", number=0, epoch=0)
    assert "rmvdb registry rebuild" in str(told.value)
    assert "rmvdb gallery take photos --from-lost-registry" in str(told.value)


def test_numbers_of_several_workers_at_once_are_no_step_back(
    store: VectorStore, registries: Callable[[], Registry], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.registry.mark.NUMBERS", 8)
    registry = adopted(registries(), name)
    Owner(registry, store).settle("photos")

    def work(_: int) -> None:
        mine = Owner(registry, store)
        for _ in range(12):
            mine.note("photos", registry.raise_trace("photos"))
            mine.expect("photos")

    at_once(3, work)
    Owner(registry, store).settle("photos")
    mark = Owner(registry, store).read(name)
    assert mark is not None
    assert mark.number == registry.trace("photos").number >= 36
    assert len(mark.numbers) < 36


def test_a_gallery_of_an_older_rmvdb_is_marked_by_who_works_on_it_and_believed_by_who_looks(
    store: VectorStore, registries: Callable[[], Registry], name: str
) -> None:
    registry = adopted(registries(), name)
    Owner(registry, store).expect("photos")
    assert not store.exists(mark_of(name))
    Owner(registry, store).settle("photos")
    Owner(registry, store).settle("photos")
    mark = Owner(registry, store).read(name)
    assert mark is not None
    assert mark.owner == registry.identity()
    assert mark.said["gallery"] == "photos"


def test_marks_are_in_no_offer_of_names(store: VectorStore, registries: Callable[[], Registry], name: str) -> None:
    Owner(registries(), store).take("photos", name)
    with pytest.raises(CollectionMissing) as told:
        store.describe(name)
    assert mark.MARK_PREFIX not in str(told.value)
    assert mark_of(name) in store.collection_names()
    assert store.field_names(mark_of(name))[-1].startswith(mark.FIELD)


def test_a_long_name_has_a_mark_of_its_own(registries: Callable[[], Registry]) -> None:
    long = ["c" * 254 + end for end in "ab"]
    assert len({mark_of(name) for name in long}) == 2
    assert all(len(mark_of(name)) <= 255 and mark.is_mark(mark_of(name)) for name in long)


def _set_back(registry: Registry, number: int) -> None:
    from sqlalchemy import update

    from rmvdb.registry.tables import TraceRow

    with registry.engine.begin() as connection:
        connection.execute(update(TraceRow).values(number=number))


# Two processes that share a file


def _race(file: str, url: str, collections: list[str], barrier: Any, answers: Any) -> None:
    registry = Registry(url)
    store = MilvusStore(functools.partial(lite.address, Path(file), idle=5.0))
    store.version()
    for collection in collections:
        barrier.wait(60)
        answers.put((collection, took(registry, store, collection), registry.identity()))
    store.close()


def test_of_two_processes_that_share_a_lite_file_one_has_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    collections = [f"c_{number}" for number in range(20)]
    barrier, answers = context.Barrier(2), context.Queue()
    urls = [f"sqlite:///{tmp_path}/{number}.sqlite" for number in range(2)]
    for url in urls:
        migrate(url)
    file = tmp_path / "milvus.db"
    lite.address(file, idle=30.0)
    try:
        both = [context.Process(target=_race, args=(str(file), url, collections, barrier, answers)) for url in urls]
        for process in both:
            process.start()
        said = [answers.get(timeout=120) for _ in range(2 * len(collections))]
        for process in both:
            process.join(30)
    finally:
        lite.release(file)

    for collection in collections:
        had = [words == mine for name, words, mine in said if name == collection]
        assert sorted(had) == [False, True], [each for each in said if each[0] == collection]
