"""A user whom the system refuses what it does not refuse root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def a_user() -> Iterator[None]:
    """Be somebody to whom the system refuses something, even if root runs the tests."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)
