"""Galleries, their collections and their names."""

from __future__ import annotations

import pytest

from rmvdb.errors import AlreadyExists, UnknownName, UsageError
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, UpgradeRow
from tests.support.photos import OLD, add_gallery, add_upgrade, shape


def test_a_gallery_that_a_client_serves_is_not_removed(registry: Registry, gallery: GalleryRow) -> None:
    registry.refresh("photos", client="web-3", ready=1, trouble="")
    with pytest.raises(UsageError, match="Gallery 'photos' is served by client web-3; close it first"):
        registry.remove_gallery("photos")
    registry.leave("web-3")
    registry.remove_gallery("photos")

    assert registry.galleries() == []


def test_no_upgrade_is_numbered_like_one_that_was_removed(registry: Registry, upgrade: UpgradeRow) -> None:
    registry.end(upgrade.id, note="over")
    registry.remove_gallery("photos")

    assert add_upgrade(registry, add_gallery(registry)).id == upgrade.id + 1


def test_a_misspelt_name_gets_the_right_one(registry: Registry, gallery: GalleryRow) -> None:
    with pytest.raises(UnknownName, match=r"No gallery is called 'photo'; did you mean 'photos'\?"):
        registry.gallery("photo")
    with pytest.raises(UnknownName, match=r"No model version is called 'v11'; did you mean 'v1'\?"):
        registry.version("v11")
    with pytest.raises(UnknownName, match=r"No collection is called 'fotos_1'; did you mean 'photos_1'\?"):
        registry.collection("fotos_1")


def test_an_empty_registry_says_how_to_begin(registry: Registry) -> None:
    with pytest.raises(UnknownName, match="register one: rmvdb model add"):
        registry.version("v1")
    with pytest.raises(UnknownName, match="make one: rmvdb gallery add"):
        registry.gallery("photos")


def test_a_new_gallery_is_served_by_its_one_collection(registry: Registry, gallery: GalleryRow) -> None:
    plan = registry.plan("photos")

    assert [row.name for row in registry.galleries()] == ["photos"]
    assert plan.epoch == 1
    assert plan.legs == (OLD,)
    assert plan.grace == 66.0


def test_a_gallery_of_a_model_with_a_head_embeds_with_its_base(registry: Registry) -> None:
    registry.add_artifact(sha256="e" * 64, kind="head", suffix=".safetensors", size=1)
    registry.add_version(name="v1", embedder="models:old", dim=4, metric="COSINE")
    registry.add_version(name="v1+head", embedder="models:old", dim=4, metric="COSINE", base="v1", head="e" * 64)
    add_gallery(registry, model="v1+head")

    (leg,) = registry.plan("photos").legs

    assert (leg.model, leg.embedder, leg.transforms) == ("v1+head", "v1", ("e" * 64,))


def test_a_name_is_taken_once(registry: Registry, gallery: GalleryRow) -> None:
    with pytest.raises(AlreadyExists, match="Gallery 'photos' exists"):
        add_gallery(registry)
    with pytest.raises(AlreadyExists, match="Collection 'photos_1' belongs to gallery 'photos'"):
        add_gallery(registry, "pictures", schema=shape("photos_1"))


def test_a_dropped_collections_name_is_not_used_again(registry: Registry, gallery: GalleryRow) -> None:
    registry.mark_dropped("photos_1")

    with pytest.raises(AlreadyExists, match="A collection 'photos_1' belonged to gallery 'photos' until rmvdb dropped it"):
        add_gallery(registry, "pictures", schema=shape("photos_1"))


def test_a_collections_life_is_remembered(registry: Registry, gallery: GalleryRow) -> None:
    for _ in range(2):
        registry.add_collection(gallery.id, model="v1", schema=shape("photos_2"), search={})
    registry.allow_removal("photos_1")
    registry.mark_dropped("photos_1")
    first, second = registry.collections(gallery.id)

    assert (first.name, first.removal_allowed, first.dropped_at is not None) == ("photos_1", True, True)
    assert (second.name, second.adopted, second.removal_allowed, second.dropped_at) == ("photos_2", False, False, None)


def test_a_source_can_be_changed(registry: Registry, gallery: GalleryRow) -> None:
    registry.set_source("photos", "sources:folder")

    assert registry.gallery("photos").source == "sources:folder"


def test_a_collection_has_one_gallery(registry: Registry, gallery: GalleryRow) -> None:
    """Two upgrades may have been given one name for their new collections at the same time."""
    other = add_gallery(registry, "other", schema=shape("other_1"))
    for _ in range(2):  # the first answer may be lost
        registry.add_collection(gallery.id, model="v1", schema=shape("new"), search={})
    with pytest.raises(AlreadyExists, match="Another gallery has collection 'new' by now"):
        registry.add_collection(other.id, model="v1", schema=shape("new"), search={})
