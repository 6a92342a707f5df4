"""Who else may change a file: what decides which code runs must be this user's, or root's, alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rmvdb.errors import ConfigError

#: Folders, divided as those of PATH are, whose rmvdb.toml is trusted though others can change it.
VARIABLE = "RMVDB_TRUST"


def is_trusted(folder: Path) -> bool:
    """Whether RMVDB_TRUST names this folder."""
    named = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return folder.resolve() in {Path(each).expanduser().resolve() for each in named}


def refuse_foreign(path: Path) -> None:
    """ConfigError if another user may change this file or folder, or put another one in its place; nothing for a missing one.

    As ssh and sudo do, the folder that holds it is looked at, too, and so is what a link leads to. In a sticky folder, such as
    /tmp, others cannot replace what isn't theirs.
    """
    if not hasattr(os, "geteuid") or not path.exists():  # Windows has no such owners
        return
    holders = dict.fromkeys((path.parent, path.resolve().parent))
    for each in (path, *(holder for holder in holders if not holder.stat().st_mode & stat.S_ISVTX)):
        if why := _foreign(each):
            raise ConfigError(
                f"{path} is not trusted: {'it' if each == path else each} {why}, and what it names runs as user "
                f"{_user(os.geteuid())}; take that right away (chown, chmod go-w), or, if you know who that is, pass --trust "
                f"(trust=True in rmvdb.connect), or name the folder of rmvdb.toml in {VARIABLE}"
            )


def _foreign(path: Path) -> str:
    """Who else may change it, in words; empty if nobody may."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {_user(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid, found.st_uid):
        return f"can be written by group {_group(found.st_gid)}"
    return ""


def _is_own_group(group: int, user: int) -> bool:
    """Whether the group is the one that many systems give each user, with no other member."""
    import grp

    try:
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == _user(user) and not set(found.gr_mem) - {found.gr_name}


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
    """Rights of what is made in a folder: its owner's, and its group's if the folder is closed to all others."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    return 0o700 | (mode & 0o070 if not mode & 0o007 else 0)


def is_shared(path: Path) -> bool:
    """Whether another user may change it."""
    return os.name != "nt" and path.exists() and bool(_foreign(path))


def open_to_others(path: Path) -> bool:
    """Whether other users may read it."""
    return os.name != "nt" and path.exists() and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def close_to_others(path: Path) -> None:
    """Take the rights of all others away from what is this user's own."""
    if open_to_others(path) and path.stat().st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o077)
