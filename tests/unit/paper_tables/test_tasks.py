"""Which pictures the models of a table learn, which are kept for ψ and ρ, and which are searched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from examples.paper_tables import tasks
from examples.paper_tables.data import DataSet
from examples.paper_tables.tasks import Sizes, Task
from tests.support.paper_pictures import made


def classes(task: Task) -> tuple[int, ...]:
    return tuple(len(np.unique(part.labels)) for part in task.taught.values())


def test_no_kept_picture_is_learnt_and_the_old_models_classes_come_first() -> None:
    labels = list(range(10)) * 10
    found = DataSet(train=made(labels), gallery=made(labels))
    task = tasks.extended_class(found, Sizes())
    assert classes(task) == (5, 10)
    assert len(task.pairs) == 20
    assert len(task.new) == 80
    learnt = {image.tobytes() for image in task.new.images}
    assert {image.tobytes() for image in task.old.images} < learnt
    assert learnt.isdisjoint(image.tobytes() for image in task.pairs.images)
    assert np.array_equal(np.unique(task.old.labels), np.arange(5))


def test_open_classes_have_nothing_in_common() -> None:
    labels = list(range(10)) * 10
    task = tasks.open_class(DataSet(train=made(labels), gallery=made(labels)), Sizes())
    assert not task.shared
    assert classes(task) == (3, 7)
    assert {image.tobytes() for image in task.old.images}.isdisjoint(image.tobytes() for image in task.new.images)


def test_with_less_data_the_old_model_knows_every_class() -> None:
    labels = list(range(4)) * 50
    task = tasks.extended_data(DataSet(train=made(labels), gallery=made(labels)), Sizes(), kept=0.0)
    assert (len(task.old), len(task.new), len(task.pairs)) == (60, 200, 0)
    assert classes(task) == (4, 4)


def test_open_identities_are_kept_and_searched_whole() -> None:
    found = DataSet(
        train=made([n for n in range(10) for _ in range(4)]), gallery=made([n for n in range(20, 30) for _ in range(4)])
    )
    task = tasks.extended_class(found, Sizes(searched=13))
    assert np.unique(task.pairs.labels, return_counts=True)[1].tolist() == [4, 4]
    assert np.unique(task.gallery.labels, return_counts=True)[1].tolist() == [4, 4, 4]
    assert len(task.new) == 32


def test_each_model_of_a_sequence_learns_what_the_one_before_did_and_more() -> None:
    labels = list(range(10)) * 10
    task = tasks.sequence(DataSet(train=made(labels), gallery=made(labels)), Sizes(), kept=0.0)
    assert classes(task) == (2, 10, 2, 4, 6, 8, 10)
    known = [{image.tobytes() for image in step.images} for step in task.steps]
    assert all(few < many for few, many in pairwise(known))
