"""A registry that names code meets a machine whose rmvdb.toml doesn't, or an rmvdb.toml of another user."""

from __future__ import annotations

import os
import stat

import pytest

from rmvdb import errors
from rmvdb.app import config
from tests.support.project import Project


def test_code_that_only_the_registry_names_does_not_run(project: Project) -> None:
    settings = project.folder / "rmvdb.toml"
    settings.write_text(settings.read_text().replace('[models]\nallow = ["models"]\n', ""))
    saying = f'which {settings} does not allow; if you trust it, write allow = ["models"] there, below [models]'

    with pytest.raises(errors.ConfigError, match="names code of the module 'models'"), project.client() as client:
        client.search("anything")
    assert saying in project.ask("search", "anything", code=2).stderr
    assert saying in project.ask("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", code=2).stderr
    assert project.json("status")["upgrade"] is None

    assert f"{settings} allows code of models now, which the registry names" in project.ask("db", "upgrade").stdout
    assert '[models]\nallow = ["models"]\n' in settings.read_text()
    assert project.json("search", "anything")["hits"]
    assert "allows code" not in project.ask("db", "upgrade").stdout


def test_adding_a_model_or_a_source_allows_its_module(project: Project) -> None:
    (project.folder / "others.py").write_text("from models import *\nimport models\n\n\ndef v4():\n    return models.v3()\n")
    assert "allows code of others now" in project.ask("model", "add", "v4", "--embedder", "others:v4").stdout
    assert 'allow = ["models", "others"]' in (project.folder / "rmvdb.toml").read_text()
    assert "allows code" not in project.ask("gallery", "source", "things", "call:models:items").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_files_of_init_belong_to_their_user_and_another_users_are_refused(project: Project) -> None:
    made = Project(project.folder.parent / "made")
    (made.folder / "rmvdb.toml").unlink()
    made.ask("init")
    home = made.folder / ".rmvdb"
    modes = {
        path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (made.folder / "rmvdb.toml", home, home / "registry.sqlite")
    }
    assert modes == {"rmvdb.toml": "0o600", ".rmvdb": "0o700", "registry.sqlite": "0o600"}
    os.chown(made.folder / "rmvdb.toml", 12345, 12345)
    refused = made.ask("model", "list", code=2).stderr
    assert "rmvdb.toml is not trusted: it belongs to user 12345, and the code that it names runs as user root" in refused
    assert "none" in made.ask("--trust", "model", "list").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("which", ["rmvdb.toml", ".rmvdb", ".rmvdb/registry.sqlite"])
def test_a_configuration_home_or_registry_that_others_may_change_is_not_trusted(project: Project, which: str) -> None:
    path = project.folder / which
    before = path.stat()

    def refused(why: str) -> None:
        with pytest.raises(errors.ConfigError, match=f"is not trusted: .* {why}"):
            config.load(project.folder / "rmvdb.toml")
        config.load(project.folder / "rmvdb.toml", trust=True)
        os.chown(path, before.st_uid, before.st_gid)
        path.chmod(stat.S_IMODE(before.st_mode))
        config.load(project.folder / "rmvdb.toml")

    path.chmod(stat.S_IMODE(before.st_mode) | 0o002)
    refused("can be written by every user")
    os.chown(path, before.st_uid, 12345)
    path.chmod(stat.S_IMODE(before.st_mode) | 0o020)
    refused("can be written by group 12345")
    os.chown(path, 12345, before.st_gid)
    refused("belongs to user 12345")
    if path.is_file():  # a link in a folder of one's own to a file in another's
        theirs = project.folder.parent / "theirs"
        theirs.mkdir()
        path.rename(theirs / path.name)
        path.symlink_to(theirs / path.name)
        os.chown(theirs, 12345, 12345)
        with pytest.raises(errors.ConfigError, match=r"is not trusted: .* belongs to user 12345.*, pass trust=True, or name"):
            config.load(project.folder / "rmvdb.toml")
