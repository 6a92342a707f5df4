"""A folder of pictures, the smallest scale, and the vectors of two models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.paper_tables.rows import Ground, Legs
from examples.paper_tables.scales import Scale
from rmvdb.learning.training import TrainingSettings
from tests.support.paper_pictures import READER, made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "load.py").write_text(READER)
    return tmp_path


@pytest.fixture(scope="module")
def tiny() -> Scale:
    return Scale(backbones=("small", "small"), epochs=1, settings=TrainingSettings(epochs=1, least_steps=2, hidden=8))


@pytest.fixture
def legs() -> tuple[Legs, Ground, np.ndarray]:
    rng = np.random.default_rng(3)
    labels = np.arange(60) % 5
    old, new = (rng.normal(size=(60, 8)).astype(np.float32) + far * np.eye(8, dtype=np.float32)[labels] for far in (1, 3))
    ground = Ground.of(made(labels.tolist()), None, rng.random(60))
    return Legs(old_q=old, old_g=old, new_q=new, new_g=new), ground, labels
