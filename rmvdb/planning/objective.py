"""The metrics that a plan can be chosen by. Imports neither numpy nor torch, because `rmvdb --help` reads the names."""

from __future__ import annotations

from enum import StrEnum


class Objective(StrEnum):
    """The metric that should rise, because users judge their searches by it."""

    #: The mean over queries of average precision over the full ranking.
    MAP = "mAP"
    #: The share of queries whose first hit is relevant.
    CMC = "CMC@1"
    #: The discounted gain of the first ten hits, as a share of the best possible.
    NDCG = "nDCG@10"
    #: The share of relevant records among the first ten hits.
    RECALL = "recall@10"


#: The metric if none is named, by what decides relevance. Without labels the new model's ten nearest are relevant, and mAP tells
#: candidates apart better than recall@10 does (docs/choosing.md has the figures).
DEFAULT = {"answers": Objective.NDCG, "labels": Objective.MAP, "neighbours": Objective.MAP}
