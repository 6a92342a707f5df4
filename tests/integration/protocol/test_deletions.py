"""A record that a client deletes just before its batch is compared stays deleted, there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rmvdb.serving.client import Client
from rmvdb.types import BatchState, Phase
from tests.support.inprocess import Gallery, drive, make

#: More of one batch than may be missing without a reason.
SOME = [11, 12, 13, 14, 15]


def deleting(gallery: Gallery, client: Client, collection: str) -> Callable[[str, str], None]:
    """Return a hook that deletes SOME as their batch is compared: within a grace, so that the batch comes again."""

    def looked(_: str, looked_at: str) -> None:
        copied = gallery.in_state(BatchState.COPIED)
        if looked_at == collection and SOME[0] in gallery.source.of and copied >= set(SOME):
            for id in SOME:
                del gallery.source.of[id]
            client.delete(SOME)

    return looked


def test_deletions_within_a_grace_of_the_comparison_are_not_taken_for_another_programs(gallery: Gallery) -> None:
    with gallery.client() as client:
        gallery.store.looked = deleting(gallery, client, "texts_v1")
        drive(gallery, width=1)
        gallery.expect_moved()
        assert SOME[0] not in gallery.source.of
        assert client.get(SOME) == []


def test_records_deleted_during_a_roll_back_do_not_come_back(tmp_path: Path) -> None:
    gallery = make(tmp_path)
    drive(gallery)
    conductor = gallery.conductor()
    undo = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert undo is not None
    gallery.upgrade = undo
    with gallery.client() as client:
        gallery.store.looked = deleting(gallery, client, "texts_v2")
        assert conductor.advance(undo, gallery.worker(width=1)).phase == Phase.CUT_OVER
        assert SOME[0] not in gallery.source.of
        assert client.get(SOME) == []
    assert gallery.records("texts_v1").keys() == gallery.source.of.keys()
    gallery.registry.close()
