"""When a client shares the vectors that its searches made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rmvdb.serving import shared_vectors
from rmvdb.serving.shared_vectors import APART, EVERY, WAITING, Embedded, SharedVectors

SOME = Embedded(embedder="v2", collection="photos", digest=b"1", raw=np.zeros(2, np.float32))


@pytest.mark.parametrize(("records", "pause"), [(1, EVERY), (WAITING // 2, APART)])
def test_vectors_are_shared_every_ten_seconds_and_oftener_only_if_many_wait(
    monkeypatch: pytest.MonkeyPatch, records: int, pause: float
) -> None:
    now = [1000.0]
    monkeypatch.setattr(shared_vectors.time, "monotonic", lambda: now[0])
    unused: Any = None
    shared = SharedVectors("photos", registry=unused, store=unused, cache=unused, most=1)
    assert shared.take({0: SOME})
    shared._waiting.clear()
    assert not shared.take(dict.fromkeys(range(records), SOME))
    now[0] += pause - 0.1
    assert not shared.take({})
    now[0] += 0.2
    assert shared.take({})
