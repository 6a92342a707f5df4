"""Many threads load the object of a spec at once. test_config.py tests how specs and URLs are read."""

from __future__ import annotations

import importlib
import json
import threading
import time

import pytest

from rmvdb.items.objects import load_object
from tests.support.photos import at_once


def test_threads_load_objects_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself raises KeyError where two of them empty the importers' caches at once."""
    emptying, met = threading.Lock(), list[bool]()

    def empty() -> None:
        alone = emptying.acquire(blocking=False)
        met.append(not alone)
        time.sleep(0.05)
        if alone:
            emptying.release()

    monkeypatch.setattr(importlib, "invalidate_caches", empty)
    loaded = at_once(4, lambda _: load_object("json:loads"))

    assert (met, loaded) == ([False] * 4, [json.loads] * 4)
