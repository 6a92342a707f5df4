"""Real images, from the folder that the environment variable TEST_DATA names (RMVDB_… would be taken for a setting)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_images() -> Path:
    """The folder with `cifar100` and `omniglot`, and `load.py` that reads them."""
    folder = Path(os.environ.get("TEST_DATA", ""))
    if not os.environ.get("TEST_DATA") or not folder.is_dir():
        pytest.skip("needs real images: set TEST_DATA to a folder that holds cifar100/ and omniglot/")
    return folder
