"""The transforms of methods, each fitted once on the first part of a sample."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rmvdb.errors import PlanRefused
from rmvdb.learning.method import METHODS, Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning.part import Part
from rmvdb.types import Metric, ReportProgress

if TYPE_CHECKING:
    from rmvdb.learning.transforms import Transform

#: The closed forms at which a trained ψ can start.
LINEAR = (Method.PROCRUSTES, Method.RIDGE, Method.CENTRED)
#: The weights of the old model's own query in a blend.
WEIGHTS = (0.2, 0.35, 0.5, 0.65, 0.8)
#: Blends are made of so many of the best closed forms.
BLENDED = 2
#: A training that would have less time than this many seconds is not begun.
LEAST_SECONDS = 1.0


class Fits:
    """The transforms of every method, fitted when they are first asked for.

    If a method has variants, such as a weight, `worth` on the second part decides.
    """

    def __init__(
        self,
        train: Part,
        logged: Pairs | None,
        *,
        worth: Callable[[Fitted], float],
        keeps_quality: Callable[[Fitted], bool],
        settings: TrainingSettings,
        seconds: float | None,
        progress: ReportProgress,
    ) -> None:
        """`keeps_quality` tells of a ρ whether it may be served. `seconds`: about how long all training together may take."""
        self._train, self._logged, self._settings, self._progress = train, logged, settings, progress
        self._worth, self._keeps_quality = worth, keeps_quality
        self._until = None if seconds is None else time.monotonic() + seconds
        #: The settings that were chosen for a method, if it has any.
        self.settings_of: dict[Method, Mapping[str, Any]] = {}
        self._fits: dict[Method, Fitted] = {}
        #: A plan asks for the linear ones twice: to serve them, and to start there.
        self._linear_variants = functools.cache(self._variants)
        self._fitted: dict[Method, tuple[Method, Fitted]] = {}

    @property
    def labelled(self) -> bool:
        """Return whether the pairs have labels."""
        return self._train.pairs.labels is not None

    @property
    def is_late(self) -> bool:
        """Return whether the time for all fitting is over."""
        return self._until is not None and time.monotonic() > self._until

    def fitted(self, method: Method) -> tuple[Method, Fitted]:
        """Return the method to serve, with its transforms: the method without ρ, unless ρ keeps the quality."""
        if method not in self._fitted:
            self._fitted[method] = self._served(method)
        return self._fitted[method]

    def _served(self, method: Method) -> tuple[Method, Fitted]:
        # Without labels the new model's own neighbours decide relevance, and any ρ can only lead away from them.
        if method.has_head and self.labelled and (fitted := self._fit(method)).head is not None and self._keeps_quality(fitted):
            return method, fitted
        return method.headless, self._fit(method.headless)

    def _fit(self, method: Method) -> Fitted:
        if method not in self._fits:
            self._fits[method] = self._made(method)
        return self._fits[method]

    def _made(self, method: Method) -> Fitted:
        spec = METHODS[method]
        if spec.closed_form:
            return self._best(method, self._closed(method))
        if spec.blends:
            return self._best(method, self._blends())
        fitted = self._trained(method, self._settings)
        if method.contrasts and self._settings.pull is None and self.labelled:
            return self._pulled(method, fitted)
        return fitted

    def _best(self, method: Method, variants: Iterator[tuple[Mapping[str, Any], Fitted]]) -> Fitted:
        settings, fitted = max(variants, key=lambda each: self._worth(each[1]))
        self.settings_of[method] = settings
        return fitted

    def _closed(self, method: Method) -> Iterator[tuple[Mapping[str, Any], Fitted]]:
        self._progress(f"computing {method}", 0, 1)
        made = self._linear_variants(method) if method in LINEAR else self._variants(method)
        self._progress(f"computing {method}", 1, 1)
        return ((settings, Fitted(reverse=reverse)) for settings, reverse in made)

    def _blends(self) -> Iterator[tuple[Mapping[str, Any], Fitted]]:
        """Yield blends of the best closed forms."""
        if Metric.LORENTZ in (self._train.old_metric, self._train.new_metric):
            raise PlanRefused("Points of LORENTZ cannot be blended; choose another method")
        forms = [method for method, spec in METHODS.items() if spec.closed_form]
        best = sorted(forms, key=lambda method: self._worth(self._fit(method)), reverse=True)[:BLENDED]
        for method in best:
            for weight in WEIGHTS:
                yield {"of": str(method), "weight": weight}, replace(self._fit(method), blend=weight)

    @functools.cached_property
    def _pairs(self) -> Pairs:
        """Return the pairs and the logged queries, since ψ is applied to queries."""
        pairs = self._train.pairs
        if self._logged is None:
            return Pairs(old=pairs.old, new=pairs.new)
        old, new = ((getattr(pairs, name), getattr(self._logged, name)) for name in ("old", "new"))
        return Pairs(old=np.concatenate(old), new=np.concatenate(new))

    def _pulled(self, method: Method, alone: Fitted) -> Fitted:
        """Return the better, on the part to choose by, of the contrast alone and the contrast with Eq. 9 beside it.

        With few records in each class, or weak models, classes say too little about where a record lies. With many they say more.
        """
        pulled = self._trained(method, replace(self._settings, pull=1.0))
        if self._worth(pulled) <= self._worth(alone):
            return alone
        self.settings_of[method] = {"pull": 1.0}
        return pulled

    def _trained(self, method: Method, settings: TrainingSettings) -> Fitted:
        if not method.has_transforms:
            return Fitted()
        from rmvdb.learning import training

        return training.fit(
            self._train.pairs,
            method=method,
            old_metric=self._train.old_metric,
            new_metric=self._train.new_metric,
            settings=settings,
            logged=self._logged,
            start=self._start(method, settings),
            seconds=self._left(),
            progress=functools.partial(self._progress, f"training {method}{' beside a regression' if settings.pull else ''}"),
        )

    def _start(self, method: Method, settings: TrainingSettings) -> Method | None:
        """Return the closed form at which the training of ψ starts. The papers' own ψ starts at random weights."""
        if settings == TrainingSettings.paper(blocks=settings.blocks, seed=settings.seed) or not method.trains_reverse:
            return None
        return self._linear

    @functools.cached_property
    def _linear(self) -> Method | None:
        """Return the linear closed form whose first variant is worth most; None if there is none for these metrics."""
        try:
            return max(LINEAR, key=lambda method: self._worth(Fitted(reverse=self._linear_variants(method)[0][1])))
        except PlanRefused:
            return None

    def _variants(self, method: Method) -> list[tuple[dict[str, float | bool], Transform]]:
        from rmvdb.learning import closed_forms  # here, so that commands that fit nothing do not wait for torch

        return closed_forms.variants(
            method, self._pairs, old_metric=self._train.old_metric, new_metric=self._train.new_metric, seed=self._settings.seed
        )

    def _left(self) -> float | None:
        """Return the seconds for the next training: a third of those that are left, so that others have theirs."""
        return None if self._until is None else max(LEAST_SECONDS, (self._until - time.monotonic()) / 3)
