"""A picture that cannot be drawn is refused before the work, not after it."""

import sys
from pathlib import Path

import pytest

from rmvdb import picture
from rmvdb.errors import ConfigError, UsageError


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'rmvdb\[plot\]'"):
        picture.check(tmp_path / "curves.png")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    picture.check(tmp_path / "curves.png")
    with pytest.raises(UsageError, match="does not exist; make it"):
        picture.check(tmp_path / "nowhere" / "curves.png")
