"""The registry is lost at every point of an upgrade and of a roll back, and brought back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inprocess import Gallery
from tests.support.lost import lost_before_a_write, lost_in_a_roll_back, rolled_back_after_a_loss, with_odd_vectors


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, both collections served, four batches listed."""
    made = with_odd_vectors(tmp_path)
    yield made
    made.registry.close()


@pytest.mark.parametrize("number", range(1, 13))
def test_lost_before_any_write_of_a_worker_every_record_and_every_clients_write_is_there_in_the_end(
    gallery: Gallery, number: int
) -> None:
    lost_before_a_write(gallery, number)


@pytest.mark.parametrize("number", [1, 3, 5, 6, 8, 10, 12])
def test_a_roll_back_after_a_loss_gives_what_the_records_were_and_the_writes_since(gallery: Gallery, number: int) -> None:
    rolled_back_after_a_loss(gallery, number)


@pytest.mark.parametrize("number", range(1, 9))
def test_lost_in_the_middle_of_a_roll_back_it_goes_on_to_the_old_model(gallery: Gallery, number: int) -> None:
    lost_in_a_roll_back(gallery, number)
