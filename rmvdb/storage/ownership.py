"""Checks who else may change a file. A file that decides which code runs must belong to this user, or root, alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rmvdb.errors import ConfigError

#: An environment variable with folders, as in PATH, whose rmvdb.toml is trusted although others can change it.
VARIABLE = "RMVDB_TRUST"


def is_trusted(folder: Path) -> bool:
    """Tell whether RMVDB_TRUST names this folder."""
    named = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return folder.resolve() in {Path(each).expanduser().resolve() for each in named}


def refuse_foreign(path: Path, how: str = "trust=True") -> None:
    """Raise ConfigError if another user may change this file or folder, or replace it. A missing one passes.

    As ssh and sudo do, this checks the folder that holds it, too, and the target of a link. In a sticky folder, such as /tmp,
    others cannot replace files that are not theirs. `how` says how the caller is told to trust.
    """
    if not hasattr(os, "geteuid") or not path.exists():  # Windows has no such owners
        return
    holders = dict.fromkeys((path.parent, path.resolve().parent))
    for each in (path, *(holder for holder in holders if not holder.stat().st_mode & stat.S_ISVTX)):
        if why := _foreign(each):
            raise ConfigError(
                f"{path} is not trusted: {'it' if each == path else each} {why}, and the code that it names runs as user "
                f"{_user(os.geteuid())}; remove that right (chown, chmod go-w), or, if you trust them, pass {how}, "
                f"or name the folder of rmvdb.toml in {VARIABLE}"
            )


def _foreign(path: Path) -> str:
    """Say who else may change it; empty if only this user and root may."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid, status.st_uid):
        return f"can be written by group {_group(status.st_gid)}"
    return ""


def _is_own_group(group: int, user: int) -> bool:
    """Tell whether it is the user's own group, which many systems give each user, without other members."""
    import grp

    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == _user(user) and not set(entry.gr_mem) - {entry.gr_name}


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def private_mode(folder: Path) -> int:
    """Return the rights for new files in a folder: its owner's, and its group's if the folder is closed to all others."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    return 0o700 | (mode & 0o070 if not mode & 0o007 else 0)


def is_shared(path: Path) -> bool:
    """Tell whether another user may change it."""
    return os.name != "nt" and path.exists() and bool(_foreign(path))


def open_to_others(path: Path) -> bool:
    """Tell whether other users may read it."""
    return os.name != "nt" and path.exists() and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def close_to_others(path: Path) -> None:
    """Remove all other users' rights to a file that this user owns."""
    if open_to_others(path) and path.stat().st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o077)
