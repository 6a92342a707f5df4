"""Reads the settings from rmvdb.toml and RMVDB_* environment variables. The environment wins.

rmvdb.toml is the file that `load` is given, or RMVDB_CONFIG names, or the nearest one in the current folder and above.
Relative paths start at its folder. If other users may change it, it is refused, unless RMVDB_TRUST names its folder.
`rmvdb.app.settings` has each setting with its meaning.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from pydantic import ValidationError
from pydantic_settings import SettingsError

from rmvdb.app import config_file, wrong_settings
from rmvdb.app.settings import DatabaseUrl, ProjectSettings
from rmvdb.errors import ConfigError
from rmvdb.storage import files, ownership


def load(path: Path | None = None, *, trust: bool = False, how: str = "trust=True") -> ProjectSettings:
    """Read the settings.

    Without `trust`, or RMVDB_TRUST, it refuses a file, a home and a registry of SQLite that other users may change. `how` says
    how this caller is told to trust.
    Raises ConfigError with one sentence that names the file or variable, the key and the way out.
    """
    file = config_file.find(path)
    base = file.parent if file else Path.cwd()
    trust = trust or ownership.is_trusted(base)
    if file and not trust:
        _refuse_foreign(file, how)
    wrong_settings.refuse_unknown_variables()
    try:
        settings = ProjectSettings(**(config_file.read(file) if file else {}))
    except ValidationError as exc:
        raise ConfigError(wrong_settings.sentence(exc, file)) from exc
    except SettingsError as exc:
        raise ConfigError(f"Environment: {exc}; write JSON, or one variable for each key as in RMVDB_MILVUS__URI") from exc
    settings = _resolved(settings, base)
    if not trust:
        for each in filter(None, (settings.folder, settings.registry_file)):
            _refuse_foreign(each, how)
    return settings


def _refuse_foreign(path: Path, how: str) -> None:
    try:
        ownership.refuse_foreign(path, how)
    except PermissionError as exc:
        raise ConfigError(f"{path} cannot be looked at: permission denied; correct the rights to its folder") from exc


def _resolved(settings: ProjectSettings, base: Path) -> ProjectSettings:
    """Return the settings with absolute paths and without empty addresses."""
    uri, url = settings.milvus.uri, settings.registry.url.get_secret_value()
    if settings.bucket:
        for setting, value in (("milvus.uri", uri), ("registry.url", url)):
            if not value:
                raise ConfigError(f"home is in a bucket, {settings.bucket}, which cannot hold a database; set {setting}, too")
    home = settings.home if settings.bucket else _absolute(settings.home, base)
    if not uri:
        uri = str(home / "milvus.db")
    elif "://" not in uri and not uri.startswith("unix:"):
        uri = str(_absolute(Path(uri), base))
    if not url:
        url = f"sqlite:///{_in_url(home) / 'registry.sqlite'}"
    elif url.startswith("sqlite:///") and url != "sqlite:///:memory:":
        file = files.expanded(Path(url.removeprefix("sqlite:///")))
        url = f"sqlite:///{_absolute(file, base if file.is_absolute() else _in_url(base))}"
    flag = settings.throttle.flag
    changes = {
        "home": home,
        "local": _absolute(settings.local, base),
        "throttle": settings.throttle.model_copy(update={"flag": flag and _absolute(flag, base)}),
        "milvus": settings.milvus.model_copy(update={"uri": uri}),
        "registry": settings.registry.model_copy(update={"url": DatabaseUrl(url)}),
    }
    return settings.model_copy(update=changes)


def _absolute(path: Path, base: Path) -> Path:
    return Path(os.path.normpath(base.absolute() / files.expanded(path)))


def _in_url(folder: Path) -> Path:
    """Return a folder that is to stand in the URL of a database. Raise ConfigError if it would mean another one there."""
    if "?" in str(folder) or unquote(str(folder)) != str(folder):
        raise ConfigError(
            f"{folder} cannot hold the registry: in the URL of a database a ? ends the path, and a % with two digits stands for "
            "another character; rename that folder, or set registry.url to a database elsewhere"
        )
    return folder
