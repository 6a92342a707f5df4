"""Rebuild a lost registry: first from the manifest, then the work list, from the collections and the archive.

Every record in the collection that an upgrade fills raises two questions. Did a batch make it from a record that it read? If not,
a client wrote it since, and no batch may overwrite it. Is it still in the other collection? Then it must leave that one, after
one grace and the comparison, like any copied record. Records that only the other collection holds are listed as usual.
"""

from __future__ import annotations

import fcntl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb import errors
from rmvdb.protocols import VectorStore
from rmvdb.registry import schema
from rmvdb.registry.manifest import Manifest
from rmvdb.registry.mark import BEYOND, Owner
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow
from rmvdb.registry.upgrade_plan import EpochName
from rmvdb.storage.archive import Archive, ArchiveFile
from rmvdb.storage.files import file_name
from rmvdb.text import RESUMABLE, counted
from rmvdb.types import Id, Phase, ReportProgress
from rmvdb.upgrade.id_hashes import hashes


class Rebuild:
    """Brings a lost registry back.

    `quiet`: seconds after which no write or claim of the lost registry can be alive. `search`: the search parameters of new
    collections, by gallery.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        archive: Archive,
        manifest: Manifest,
        lock: Path,
        quiet: float,
        search: Callable[[str], Mapping[str, Any]] = lambda _: {},
        say: Callable[[str], None] = lambda _: None,
        report: ReportProgress = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> None:
        """`lock` is a file in this machine's folder, which only one rebuild holds at a time."""
        self._search, self._lock = search, lock
        self._registry, self._store, self._archive, self._manifest = registry, store, archive, manifest
        self._quiet, self._say, self._report = quiet, say, report
        self._stop = stop or threading.Event()

    def run(self) -> None:
        """Bring back everything. It can be run again. A gallery that was not finished begins again, the others stay as they are.

        Raises:
            AlreadyExists: the registry holds something else.
            RegistryError: another process rebuilds it, or the manifest is too old for the collections, or cannot be read.
        """
        with self._alone():
            if self._is_begun():
                self._refuse_at_work()
            else:
                self._restore()
            refused = [self._refused(gallery) for gallery in self._registry.galleries() if gallery.rebuilding]
            if first := next(filter(None, refused), None):
                raise first

    def take(self, name: str) -> list[str]:
        """Take a gallery from a lost registry, or keep it in this one after it went back in time. Return the collections.

        The work list of a gallery that this registry knows is older than the data. So it is made again, like that of a lost one,
        and until then nothing is written, claimed or served anew. You can add a gallery that it does not know once it is taken.

        Raises: UnknownName if there is no such gallery, UsageError if the other registry is at work, CollectionMissing if this
        one is so old that a clean-up has dropped a collection since, or that it does not know a collection that was filled since.
        """
        known = next((row for row in self._registry.galleries() if row.name == name), None)
        with self._alone():
            if known is None:
                return self._take(name, [])[0]
            self._expect_young_enough(known)
            self._registry.begin_rebuild(known.id)
            try:
                served = [leg.collection for leg in self._registry.plan(name).write_targets]
                taken, *reached = self._take(name, served)
            except BaseException:
                self._registry.rebuilt(known.id)  # nothing is taken
                raise
            if refused := self._refused(known, reached=reached):
                raise refused
        return taken

    def _take(self, name: str, served: Sequence[str]) -> tuple[list[str], int, int]:
        """Take the served collections and those that another registry marked. Return them, and the last number and epoch of
        that registry."""
        owner = Owner(self._registry, self._store)
        if not (collections := list(dict.fromkeys([*served, *owner.named(name)]))):
            raise errors.UnknownName("gallery", name, [row.name for row in self._registry.galleries()])
        return collections, *owner.take_over(name, collections, self._wait)

    def _name_original(self, gallery: GalleryRow, epoch: int) -> None:
        """Say that searches may miss writes, if a roll back to a kept original may have been forgotten.

        `epoch`: the one that the lost registry had reached. From such a roll back on clients write into the original alone. A
        clean-up that was cut off looks the same, and after that they write into the new collection alone. Say it before
        `catch_up` raises the epoch: a run that was interrupted after that could not tell any more.
        """
        upgrade = self._registry.active_upgrade(gallery.id)
        if upgrade and upgrade.original and upgrade.undoes is None and epoch > gallery.epoch:
            self._say(
                f"gallery {gallery.name}: it was served differently after {self._manifest.path} or the copy of the registry was "
                f"made. If it had been rolled back, run rmvdb rollback once this has ended: until then searches miss what was "
                f"written since, which only {upgrade.original} holds"
            )

    def _expect_young_enough(self, gallery: GalleryRow) -> None:
        """Raise CollectionMissing if a later upgrade dropped a collection that is served, or filled one that is not known."""
        ways = (
            "put the newer database back, or empty this one and run rmvdb registry rebuild; without a manifest, empty it, then "
            "run rmvdb db upgrade, this command again, and rmvdb gallery add with the collection that it names"
        )
        served = [leg.collection for leg in self._registry.plan(gallery.name).write_targets]
        if gone := next((each for each in served if not self._store.exists(each)), None):
            raise errors.CollectionMissing(
                f"Collection {gone!r}, by which this registry serves gallery {gallery.name!r}, is gone, so the gallery cannot be "
                f"taken; {ways}"
            )
        if later := self._filled_since(gallery):
            raise errors.CollectionMissing(
                f"Gallery {gallery.name!r} has records in collection {later!r}, which this registry does not know, so the "
                f"gallery cannot be taken; {ways}"
            )

    def _filled_since(self, gallery: GalleryRow) -> str | None:
        """Return a collection of the gallery that holds records and that this registry does not know, if there is one."""
        known = {row.name for row in self._registry.collections(gallery.id)}
        for row in self._registry.upgrades(gallery.id):
            known |= {row.new_collection, *row.old_collections}
        marked = sorted(set(Owner(self._registry, self._store).marked(gallery.name)) - known)
        # A gallery add that was killed leaves an empty collection, or a mark alone.
        return next((each for each in marked if self._store.exists(each) and self._store.count(each)), None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out another rebuild: it would forget this one's notes, and let work begin before this one is done."""
        try:
            file = self._lock.open("ab")  # the lock ends with its process
        except OSError:  # whatever cannot be written there is named by the first write
            yield
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise errors.RegistryError(
                    f"Another rmvdb registry rebuild works with {self._manifest.path}; wait until it has ended"
                ) from exc
            yield

    # --- the manifest -------------------------------------------------------------------------------------------------

    def _is_begun(self) -> bool:
        """Whether an earlier run restored the galleries. Raise AlreadyExists if the registry is not lost."""
        if schema.current(self._registry.url.render_as_string(hide_password=False)) is None:
            return False
        galleries = self._registry.galleries()
        if galleries and not any(gallery.rebuilding for gallery in galleries):
            raise errors.AlreadyExists(
                f"The registry at {self._registry.shown_url} holds gallery {galleries[0].name!r}; only an empty one is rebuilt. "
                "If it is not the right one, remove its file, or drop its tables"
            )
        return bool(galleries)

    def _restore(self) -> None:
        contents = self._manifest.read()
        # While it is lost, no write can be announced and no lease renewed. Writes and batches under way end by themselves. Before
        # that, a reading of the collections may be out of date at once.
        self._wait()
        schema.upgrade(self._registry.url.render_as_string(hide_password=False))
        self._registry.restore(contents)
        versions = counted(len(contents["model_versions"]), "model version is", "model versions are")
        self._say(f"registry {self._registry.shown_url}: {versions} back")

    def _refuse_at_work(self) -> None:
        """Wait again, unless an earlier run has caught up with the marks: perhaps it was killed while it waited.

        Raises:
            UsageError: another registry writes meanwhile, so this one is a copy that must not go on.
        """
        owner, behind = Owner(self._registry, self._store), list[str]()
        for gallery in (each for each in self._registry.galleries() if each.rebuilding):
            number = self._registry.trace(gallery.name).number
            served = [leg.collection for leg in self._registry.plan(gallery.name).write_targets]
            behind += [each for each in served if (mark := owner.read(each)) is not None and mark.number >= number]
        if behind:
            owner.refuse_at_work(behind, self._wait)

    def _wait(self) -> None:
        self._say(f"waiting {self._quiet:g} s, until no write or batch that the lost registry knew of is under way")
        for passed in range(int(self._quiet)):
            self._report("waiting", passed, int(self._quiet))
            self._pause(1.0)
        self._pause(self._quiet % 1.0)

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise errors.Stopped(RESUMABLE)

    # --- the work -----------------------------------------------------------------------------------------------------

    def _refused(self, gallery: GalleryRow, *, reached: Sequence[int] = ()) -> errors.RegistryError | None:
        """Rebuild a gallery. Return the error if it cannot be rebuilt, so that the others still are.

        `reached`: the last number and epoch of the registry from which the gallery was taken.
        """
        upgrade = self._registry.active_upgrade(gallery.id)
        if upgrade is not None:
            self._put_forward(gallery, upgrade)
        gone = [
            leg.collection for leg in self._registry.plan(gallery.name).write_targets if not self._store.exists(leg.collection)
        ]
        if gone:
            return errors.RegistryError(
                f"Gallery {gallery.name!r} was served from {gone[0]!r} when {self._manifest.path} was written, and that "
                "collection is gone; empty the database, put a later manifest back, then rebuild again"
            )
        if later := self._filled_since(gallery):
            return errors.RegistryError(
                f"Gallery {gallery.name!r} has records in collection {later!r}, which {self._manifest.path} does not know: it is "
                "older than that collection; empty the database, put a later manifest back, then rebuild again"
            )
        self._catch_up(gallery, reached)
        self._rebuild(gallery)
        return None

    def _catch_up(self, gallery: GalleryRow, reached: Sequence[int]) -> None:
        """Continue after the last number that the lost registry wrote beside the data. Raise NotOwner if another one has it."""
        owner, plan = Owner(self._registry, self._store), self._registry.plan(gallery.name)
        marks = [mark for leg in plan.write_targets if (mark := owner.read(leg.collection)) is not None]
        known = [(mark.number, mark.epoch) for mark in marks]
        number, epoch = (max(values) for values in zip(reached or (0, 0), *known, strict=True))
        self._name_original(gallery, epoch)
        if reached or self._registry.trace(gallery.name).number < number:
            self._registry.catch_up(gallery.name, number=number + BEYOND, epoch=epoch)
        owner.settle(gallery.name)

    def _put_forward(self, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
        """Put the upgrade where its collections show it, if it was deployed, cleaned up, or rolled back after this was known."""
        new, old = upgrade.new_collection, [self._store.exists(each) for each in upgrade.old_collections]
        if upgrade.original or not self._store.exists(new):
            return
        if upgrade.undoes is None and upgrade.phase in (Phase.PLANNED, Phase.SERVING_BOTH) and not any(old):
            phase, which, note = Phase.CUT_OVER, EpochName.FINAL, f"only {new} is there"
        elif upgrade.phase in (Phase.PLANNED, Phase.CUT_OVER) and all(old) and (held := self._holds_unserved(gallery, upgrade)):
            phase, which, note = Phase.SERVING_BOTH, EpochName.SERVING, f"{held} holds records"
        else:
            return
        shape, search = self._store.describe(new), self._search(gallery.name)
        self._registry.add_collection(gallery.id, model=upgrade.to_version, schema=shape, search=search)
        self._registry.put_forward(upgrade.id, phase, which, note=note)

    def _holds_unserved(self, gallery: GalleryRow, upgrade: UpgradeRow) -> str | None:
        """Return a collection of the upgrade that holds records and that the plan in force does not search, if there is one."""
        served = {leg.collection for leg in self._registry.plan(gallery.name).legs}
        others = (leg.collection for leg in upgrade.plan.legs(EpochName.SERVING) if leg.collection not in served)
        return next((each for each in others if self._store.exists(each) and self._store.count(each)), None)

    def _rebuild(self, gallery: GalleryRow) -> None:
        plan = self._registry.plan(gallery.name)
        served = ", ".join(leg.collection for leg in plan.legs)
        self._say(f"gallery {gallery.name}: served from {served} at epoch {plan.epoch}; writes wait for its work list")
        upgrade = self._registry.active_upgrade(gallery.id)
        if upgrade is not None:
            for number in filter(None, (upgrade.undoes, upgrade.id)):
                self._look(gallery, self._registry.upgrade(number))
            self._look_behind(gallery, upgrade)
        self._registry.rebuilt(gallery.id)
        self._say(f"gallery {gallery.name}: rebuilt")

    def _look(self, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
        self._registry.forget_work(upgrade.id)  # of an interrupted run
        if not self._store.exists(upgrade.new_collection):
            return
        matcher = ArchiveMatcher(self._registry, self._store, self._archive, upgrade)
        files = matcher.readable(self._checking(self._archive.files(gallery.name, str(upgrade.id))), self._say)
        for done, file in enumerate(files, start=1):
            matcher.at(file)
            self._report("reading the archive", done, len(files))
            self._check_stop()
        matcher.at_the_rest(self._check_stop)
        self._say(
            f"upgrade {upgrade.id} from {upgrade.from_version} to {upgrade.to_version}, {upgrade.phase}: "
            f"{counted(matcher.moved, 'record was', 'records were')} moved into {upgrade.new_collection}, "
            f"{counted(matcher.written, 'was', 'were')} written there by clients"
        )

    def _checking(self, files: Sequence[ArchiveFile]) -> Iterator[ArchiveFile]:
        for done, file in enumerate(files, start=1):
            yield file
            self._report("checking the archive", done, len(files))
            self._check_stop()

    def _look_behind(self, gallery: GalleryRow, upgrade: UpgradeRow) -> None:
        """Note the records that superseded upgrades had moved: those upgrades may go on after a roll back.

        The records count as written by clients, because the archive does not tell what was written since.
        """
        later = [self._registry.upgrade(number) for number in (upgrade.id, upgrade.undoes) if number is not None]
        while (number := later[-1].supersedes) is not None:
            before = self._registry.upgrade(number)
            self._registry.forget_work(number)
            self._registry.set_upgrade(number, listed=False)  # if it continues, its order and its share still hold
            for each in later:
                for file in self._archive.files(gallery.name, str(each.id)):
                    if PurePosixPath(file.path).parent.name == file_name(before.new_collection):
                        self._registry.add_written(number, self._moved_on(file, each.new_collection))
            if self._store.exists(before.new_collection):
                for page in self._store.scan(before.new_collection):
                    self._check_stop()
                    self._registry.add_written(number, [record.id for record in page])
            later.append(before)

    def _moved_on(self, file: ArchiveFile, collection: str) -> list[Id]:
        """Return the ids of a file that are in the collection of a later upgrade; none if the file is damaged."""
        there = self._store.exists(collection)
        ids = self._archive.found_ids(file, left_out=lambda why: self._say(f"left out: {why}")) if there else None
        return [record.id for record in self._store.get(collection, ids, fields=())] if ids else []


class ArchiveMatcher:
    """Finds out which records of one upgrade were copied, which of them have left, and which ones clients wrote."""

    def __init__(self, registry: Registry, store: VectorStore, archive: Archive, upgrade: UpgradeRow) -> None:
        self._registry, self._store, self._archive, self._upgrade = registry, store, archive, upgrade
        self._old = [each for each in upgrade.old_collections if store.exists(each)]
        #: The collection behind each folder of the archive.
        self._read_from = {file_name(each): each for each in upgrade.old_collections}
        #: In place, with no record lifted any more: the old collection is the new one, and its records stay.
        self._remade = upgrade.in_place and upgrade.phase in (Phase.CUT_OVER, Phase.CLEANING_UP)
        #: Whether the new collection holds moved records only. A roll back's collection has records of its own, and in place it
        #: had all, lifted.
        self._filled_from_empty = upgrade.undoes is None and (not upgrade.in_place or self._remade)
        #: Hashes of the ids in the archive, and of those that are there more than once.
        self._read: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._often: set[int] = set()
        #: The ids that a reading explains, and the last file of each id that no reading has explained yet.
        self._explained: set[Id] = set()
        self._unexplained: dict[Id, ArchiveFile] = {}
        #: Ids that a roll back found in place and did not write.
        self._left: set[Id] = set()
        self._priorities = count(1)
        self.moved = self.written = 0

    def readable(self, files: Iterable[ArchiveFile], say: Callable[[str], None]) -> list[ArchiveFile]:
        """Return the files whose checksum matches. Records of damaged files count as client-written.

        Raises:
            ArtifactError: this machine cannot reach the archive, or may not read it.
        """
        read: dict[ArchiveFile, npt.NDArray[np.uint64]] = {}
        for file in files:
            ids = self._archive.found_ids(file, left_out=lambda why: say(f"left out: {why}"))
            if ids is not None:
                read[file] = hashes(ids)
        self._read, times = np.unique(np.concatenate([self._read, *read.values()]), return_counts=True)
        self._often = set(self._read[times > 1].tolist())
        return list(read)

    def at(self, file: ArchiveFile) -> None:
        """Note the fate of the records in a file. Call it for the file written last first."""
        readings = {each.record.id: each for each in self._archive.readings(file) if each.record.id not in self._explained}
        records_in_new = self._store.get(self._upgrade.new_collection, list(readings), vector=True)
        if self._upgrade.undoes is not None:
            self._left.update(record.id for record in records_in_new if readings[record.id].made is None)
        copied = [each.id for each in records_in_new if each.id in self._left or readings[each.id].is_copied_to(each)]
        as_copied = set(copied)
        others = [record.id for record in records_in_new if record.id not in as_copied]
        often = {id for id, hash in zip(readings, hashes(list(readings)).tolist(), strict=True) if hash in self._often}
        self._explained.update(often.intersection(copied))
        for id in often.intersection(others):
            self._unexplained.setdefault(id, file)
        self._note(file, copied, [id for id in others if id not in often])

    def at_the_rest(self, check_stop: Callable[[], None]) -> None:
        """Note the records that no reading explains: clients wrote them."""
        files: dict[ArchiveFile, list[Id]] = defaultdict(list)
        for id, file in self._unexplained.items():
            if id not in self._explained:
                files[file].append(id)
        for file, ids in files.items():
            self._note(file, [], ids)
        if self._filled_from_empty:
            for page in self._store.scan(self._upgrade.new_collection):
                check_stop()
                known = np.isin(hashes([record.id for record in page]), self._read)
                self._note_written([record.id for record, is_known in zip(page, known, strict=True) if not is_known])

    def _note(self, file: ArchiveFile, copied: Sequence[Id], written: Sequence[Id]) -> None:
        here = [*copied, *written]
        left = {record.id for each in self._old for record in self._store.get(each, here, fields=()) if not self._remade}
        self._note_copied(file, [id for id in here if id not in left], retired=True)
        self._note_copied(file, [id for id in copied if id in left], retired=False)
        # A record that a roll back finds in both collections may never have changed; it is moved like any other. In place,
        # nothing tells a client's record from one that is still lifted.
        self._note_written([id for id in written if self._filled_from_empty or id not in left])

    def _note_copied(self, file: ArchiveFile, ids: Sequence[Id], *, retired: bool) -> None:
        if ids:
            archive = {self._read_from[PurePosixPath(file.path).parent.name]: asdict(file)}
            left, priority = [id for id in ids if id in self._left], next(self._priorities)
            self._registry.add_copied(self._upgrade.id, ids, archive, retired=retired, priority=priority, left=left)
        self.moved += len(ids)

    def _note_written(self, ids: Sequence[Id]) -> None:
        self._registry.add_written(self._upgrade.id, ids)
        self.written += len(ids)
