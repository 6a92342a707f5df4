"""Who else may change what decides which code runs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from rmvdb import errors
from rmvdb.app import config, wiring
from rmvdb.items import objects
from rmvdb.registry.registry import Registry
from rmvdb.storage import files, ownership

#: A user that isn't this one, nor root.
OTHER = 12345

pytestmark = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, two below which the current one is."""
    for name in [each for each in os.environ if each.startswith("RMVDB_")]:
        monkeypatch.delenv(name)
    (below := tmp_path / "project" / "a" / "b").mkdir(parents=True)
    (tmp_path / "project" / "rmvdb.toml").write_text("")
    monkeypatch.chdir(below)
    return tmp_path / "project"


def test_a_configuration_of_ones_own_is_trusted(folder: Path) -> None:
    assert config.load().home == folder / ".rmvdb"


def _owned(path: Path) -> str:
    os.chown(path, OTHER, OTHER)
    return f"belongs to user {OTHER}"


def _group(path: Path) -> str:
    os.chown(path, 0, OTHER)
    path.chmod(0o775)
    return f"can be written by group {OTHER}"


def _all(path: Path) -> str:
    path.chmod(0o777)
    return "can be written by every user"


@pytest.mark.parametrize("how", [_owned, _group, _all])
@pytest.mark.parametrize("what", ["", "rmvdb.toml", ".rmvdb", ".rmvdb/registry.sqlite"])
def test_a_file_that_another_user_may_change_is_refused_unless_it_is_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: object, what: str
) -> None:
    (folder / ".rmvdb").mkdir()
    (folder / ".rmvdb" / "registry.sqlite").touch()
    why = how(folder / what)  # type: ignore[operator]

    with pytest.raises(errors.ConfigError) as caught:
        config.load()

    words = str(caught.value)
    assert str(folder / what) in words
    assert why in words
    assert "the code that it names runs as user root; remove that right (chown, chmod go-w), or" in words
    assert config.load(trust=True).home == folder / ".rmvdb"
    monkeypatch.setenv("RMVDB_TRUST", f"/nowhere{os.pathsep}{folder}")
    assert config.load().home == folder / ".rmvdb"
    monkeypatch.setenv("RMVDB_TRUST", str(folder.parent))
    with pytest.raises(errors.ConfigError, match="is not trusted"):
        config.load()


def test_a_link_is_as_trusted_as_where_it_leads_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o777)
    (tmp_path / "theirs").chmod(0o777)
    (folder / "rmvdb.toml").rename(tmp_path / "theirs" / "real.toml")
    (folder / "rmvdb.toml").symlink_to(tmp_path / "theirs" / "real.toml")
    with pytest.raises(errors.ConfigError, match="theirs can be written by every user"):
        config.load()


def test_in_a_folder_like_tmp_ones_own_file_is_trusted_and_anothers_is_not(folder: Path) -> None:
    folder.chmod(0o1777)
    assert config.load().home == folder / ".rmvdb"
    os.chown(folder / "rmvdb.toml", OTHER, OTHER)
    with pytest.raises(errors.ConfigError, match=f"it belongs to user {OTHER}"):
        config.load()


def test_a_group_of_ones_own_is_no_other_user(folder: Path) -> None:
    folder.chmod(0o775)  # of the group root, which has no other member
    assert config.load().home == folder / ".rmvdb"


def test_root_is_trusted_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    ownership.refuse_foreign(Path("/etc/passwd"))
    assert not ownership.is_shared(Path("/etc"))


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o600), (0o755, 0o600), (0o777, 0o600), (0o750, 0o640)])
def test_new_files_are_closed_to_others_unless_their_folder_is_shared_with_a_group_alone(
    tmp_path: Path, folder_mode: int, file_mode: int
) -> None:
    (home := tmp_path / "home").mkdir()
    home.chmod(folder_mode)
    before = os.umask(0o027 if folder_mode == 0o750 else 0)
    try:
        files.durable_write(home / "archive" / "things" / "a", b"1")
        files.durable_write(home / "manifest.json", b"1")
        registry = Registry(f"sqlite:///{home}/registry.sqlite", patience=1.0, keep=lambda _: None)
        with registry.engine.connect() as connection:
            connection.exec_driver_sql("CREATE TABLE t (a)")
            connection.commit()
            beside = [path for path in home.iterdir() if path.name.startswith("registry.sqlite")]
            assert len(beside) == 3
            found = {
                stat.S_IMODE(path.stat().st_mode) for path in [*beside, home / "archive" / "things" / "a", home / "manifest.json"]
            }
        registry.close()
    finally:
        os.umask(before)
    assert {oct(mode) for mode in found} == {oct(file_mode)}
    assert stat.S_IMODE((home / "archive").stat().st_mode) == (0o750 if folder_mode == 0o750 else 0o700)


def test_closing_leaves_what_is_another_users(tmp_path: Path) -> None:
    (file := tmp_path / "a").touch(mode=0o644)
    ownership.close_to_others(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    os.chown(file, OTHER, OTHER)
    ownership.close_to_others(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_modules_are_not_taken_from_a_folder_in_which_others_can_put_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from /tmp: a file there may have the name of a module that rmvdb.toml allows, or of a library."""
    monkeypatch.setattr(objects, "_left_out", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    (drop := tmp_path / "drop").mkdir()
    drop.chmod(0o1777)
    (drop / "usertheirs.py").write_text("import pathlib\npathlib.Path('ran').touch()\nthing = 1\n")
    monkeypatch.chdir(drop)

    wiring.load(folder / "rmvdb.toml")
    with pytest.raises(errors.UsageError, match=rf"other users can put files in {drop}: rmvdb looks there only with --trust"):
        objects.load_object("usertheirs:thing")
    assert not (drop / "ran").exists()

    objects._left_out.clear()
    wiring.load(folder / "rmvdb.toml", trust=True)
    assert objects.load_object("usertheirs:thing") == 1
