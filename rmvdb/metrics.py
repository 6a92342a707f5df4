"""Retrieval quality, for your own comparisons: the public names of `rmvdb.planning.quality` and `rmvdb.learning.geometry`."""

from rmvdb.learning.geometry import comparable, distances
from rmvdb.planning.quality import (
    area,
    areas,
    average_precision,
    bootstrap,
    cmc,
    fall_by_chance,
    gain,
    largest_fall,
    mean,
    negative_flips,
    p_com,
    p_up,
    recall,
    same_camera,
)

__all__ = ["area", "areas", "average_precision", "bootstrap", "cmc", "comparable", "distances", "fall_by_chance", "gain"]
__all__ += ["largest_fall", "mean", "negative_flips", "p_com", "p_up", "recall", "same_camera"]
