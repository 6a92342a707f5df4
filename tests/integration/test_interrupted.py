"""Long steps that are interrupted again and again: each run comes further than the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Phase, Record
from rmvdb.upgrade import change_epoch, compare, verify
from rmvdb.upgrade.report import VerifyPosition
from rmvdb.upgrade.status import status
from tests.support.inprocess import Gallery, drive, make


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    """Forty texts, all of them moved, which are compared ten at a time."""
    monkeypatch.setattr(compare, "AT_ONCE", 10)
    made = make(tmp_path)
    drive(made)
    yield made
    made.registry.close()


def row(gallery: Gallery) -> UpgradeRow:
    return gallery.registry.upgrade(gallery.upgrade.id)


def files_read(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the archive's files that are read from now on."""
    read: list[str] = []
    real = gallery.archive.found
    monkeypatch.setattr(gallery.archive, "found", lambda file, **options: read.append(file.path) or real(file, **options))
    return read


def test_a_process_that_dies_while_clients_are_waited_for_does_not_lose_its_verification(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = change_epoch.serve

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(change_epoch, "serve", dies)
    with pytest.raises(KeyboardInterrupt):
        gallery.conductor().cut_over(row(gallery), gallery.worker())
    monkeypatch.setattr(change_epoch, "serve", serve)
    read = files_read(gallery, monkeypatch)
    gallery.conductor().cut_over(row(gallery), gallery.worker())

    assert (row(gallery).phase, row(gallery).verifying) == (Phase.CUT_OVER, None)
    assert read == []


def test_a_comparison_counts_however_long_the_steps_before_it_take_but_not_for_ever(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = VerifyPosition(batch=gallery.registry.batches(gallery.upgrade.id)[-1].id, batches=4, fields_compared=40)
    conductor, now = gallery.conductor(), gallery.registry.now()
    verify.keep(conductor, row(gallery), verify.Begun(at, now - 3600.0))
    interrupted = verify.begun(conductor, row(gallery))
    assert interrupted == verify.Begun(at, now - 3600.0)

    monkeypatch.setattr(verify, "COUNTS", 0.0)  # the step before it took longer than that
    read = files_read(gallery, monkeypatch)
    assert verify.expect_verified(conductor, row(gallery), interrupted).ok
    assert read == []
    monkeypatch.setattr(verify, "COUNTS", 600.0)
    monkeypatch.setattr(verify, "LONGEST", 3000.0)
    assert verify.begun(conductor, row(gallery)) is None


def test_the_position_is_kept_although_a_server_showed_a_former_record_for_a_moment(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "UNDECIDED", 0.0)
    kept: list[VerifyPosition] = []
    real, former = gallery.store.get, [True]

    def get(collection: str, ids: Any, **options: Any) -> list[Record]:
        found = real(collection, ids, **options)
        if collection == "texts_v2" and any(each.id == 3 for each in found) and former:
            former.clear()
            return [replace(each, fields={"n": 99}) if each.id == 3 else each for each in found]
        return found

    monkeypatch.setattr(gallery.store, "get", get)
    report = verify.check_of(gallery.conductor()).run(gallery.task, keep=kept.append)

    assert report.ok
    assert [each.batches for each in kept] == [1, 2, 3, 4]


def test_a_reason_of_an_earlier_stop_is_gone_once_the_upgrade_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = make(tmp_path)
    gallery.registry.set_upgrade(gallery.upgrade.id, reason="Milvus is away")

    def shown() -> str:
        return str(status(gallery.registry, gallery.registry.gallery("texts")).to_json()["stopped"])

    assert shown() == "Milvus is away"
    meanwhile: list[str] = []
    gallery.store.before = lambda call, collection: meanwhile.append(shown())
    gallery.conductor().advance(row(gallery), gallery.worker())
    assert set(meanwhile) == {""}
    gallery.registry.close()


def test_a_worker_with_other_galleries_does_not_wait_for_ever_until_an_application_can_serve_the_cut_over(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_epoch, "LONG_PATIENCE", 0.3)
    monkeypatch.setattr(gallery.registry, "activate", lambda *_, **__: ["client web-1 cannot serve epoch 3 yet"])
    conductor = gallery.conductor()
    conductor.patience = 0.1
    with pytest.raises(errors.NotServed, match="client web-1 cannot serve epoch 3 yet"):
        conductor.cut_over(row(gallery), gallery.worker())
    assert row(gallery).verifying is not None


@pytest.mark.parametrize("patient", [True, False])
def test_a_worker_that_goes_on_by_itself_leaves_no_reason_when_its_window_closes(gallery: Gallery, patient: bool) -> None:
    worker, conductor = gallery.worker(), gallery.conductor()
    worker.patient = patient
    conductor.stop.set()
    with pytest.raises(errors.Stopped):
        conductor.advance(row(gallery), worker)
    assert bool(row(gallery).reason) is patient
