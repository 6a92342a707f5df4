"""The papers' data sets are read from their folders, and what is missing is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.paper_tables import data
from examples.paper_tables.rows import Ground
from rmvdb.errors import ItemError, UsageError
from tests.support.paper_pictures import CLASSES, EACH, written


def test_cifar100_is_read_through_the_folders_own_reader(folder: Path) -> None:
    found = data.cifar100(folder)
    assert found.train.images.shape == found.gallery.images.shape == (CLASSES * EACH, 3, 32, 32)
    assert found.train.images.dtype == np.uint8
    assert found.queries is None
    assert found.mirrored


def test_omniglots_background_is_trained_on_and_the_rest_searched(folder: Path) -> None:
    found = data.omniglot(folder)
    assert set(found.train.labels) == set(range(12))
    assert set(found.gallery.labels) == {12, 13, 14, 15}
    assert found.train.images.shape == (72, 3, 32, 32)
    assert (found.train.images[:, :, 0] == 255).all()
    assert found.train.images[:, :, -1].mean() < 100
    assert not found.mirrored
    assert len(np.unique(found.families)) == 3


def test_a_folder_without_a_reader_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"load\.py is not there; name a folder"):
        data.cifar100(tmp_path)


def test_market1501_reads_identity_and_camera_from_names_and_leaves_junk_out(tmp_path: Path) -> None:
    for name in ("bounding_box_train/0002_c1s1_000451_03.jpg", "query/0005_c2s1_000001_00.jpg"):
        written(tmp_path / name, 9)
    for name in ("0005_c2s1_000002_01.jpg", "0005_c3s1_000003_01.jpg", "0000_c1s1_000004_01.jpg", "-1_c1s1_000005_01.jpg"):
        written(tmp_path / "bounding_box_test" / name, 9)
    (tmp_path / "query" / "Thumbs.db").write_bytes(b"")
    found = data.market1501(tmp_path)
    assert found.train.images.shape == (1, 3, 128, 64)
    assert found.gallery.labels.tolist() == [0, 5, 5]
    assert found.gallery.cameras.tolist() == [1, 2, 3]
    ground = Ground.of(found.gallery, found.queries, np.zeros(3))
    assert ground.leave_out.tolist() == [[False, True, False]]
    assert ground.relevance.tolist() == [[False, False, True]]


def test_tinyimagenet_reads_classes_from_folders_and_from_its_list(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        written(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", 200)
    written(tmp_path / "val" / "images" / "val_0.JPEG", 100)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    found = data.tinyimagenet(tmp_path)
    assert found.train.labels.tolist() == [0, 1]
    assert found.gallery.labels.tolist() == [1]
    assert found.gallery.images.shape == (1, 3, 64, 64)
    assert abs(int(found.gallery.images[0, 0, 0, 0]) - 100) < 3


def test_a_missing_layout_and_a_broken_picture_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bounding_box_train is not there"):
        data.market1501(tmp_path)
    (tmp_path / "bounding_box_train").mkdir()
    (tmp_path / "bounding_box_train" / "0002_c1s1_000451_03.jpg").write_bytes(b"no picture")
    with pytest.raises(ItemError, match=r"0002_c1s1_000451_03\.jpg cannot be read"):
        data.market1501(tmp_path)
