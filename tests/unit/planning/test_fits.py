"""How a plan fits its transforms."""

from __future__ import annotations

import numpy as np
import pytest

from rmvdb.learning import closed_forms, training
from rmvdb.learning.method import Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning.fits import LINEAR, Fits
from rmvdb.planning.part import Part
from rmvdb.types import Metric


@pytest.mark.parametrize("best", LINEAR)
def test_a_trained_map_starts_at_the_linear_one_that_is_worth_most(best: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, starts = np.random.default_rng(0), list[object]()
    old = rng.standard_normal((200, 8)).astype(np.float32)
    pairs = Pairs(old=old, new=old @ rng.standard_normal((8, 6)).astype(np.float32))
    (_, wanted), *_ = closed_forms.variants(best, pairs, old_metric=Metric.COSINE, new_metric=Metric.COSINE)

    def fit(*_: object, start: object, **__: object) -> Fitted:
        starts.append(start)
        return Fitted()

    monkeypatch.setattr(training, "fit", fit)
    fits = Fits(
        Part(pairs=pairs, old_metric=Metric.COSINE, new_metric=Metric.COSINE, confidence=np.zeros(200)),
        None,
        worth=lambda fitted: float(fitted.reverse is not None and fitted.reverse.to_bytes() == wanted.to_bytes()),
        keeps_quality=lambda _: False,
        settings=TrainingSettings(),
        seconds=None,
        progress=lambda *_: None,
    )
    fits.fitted(Method.RQT)

    assert starts == [best]


def test_a_method_that_learned_no_head_is_the_method_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    monkeypatch.setattr(training, "fit", lambda *_, **__: Fitted())
    fits = Fits(
        Part(
            pairs=Pairs(old=old, new=old, labels=np.arange(200) % 4),
            old_metric=Metric.COSINE,
            new_metric=Metric.COSINE,
            confidence=np.zeros(200),
        ),
        None,
        worth=lambda _: 0.0,
        keeps_quality=lambda _: True,  # nothing is lost by what changes nothing
        settings=TrainingSettings(),
        seconds=None,
        progress=lambda *_: None,
    )

    assert fits.fitted(Method.RM)[0] is Method.MCL
