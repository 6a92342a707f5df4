"""Train models whose vectors can be compared with an old model's: the public names of `rmvdb.learning.compatible`."""

from rmvdb.learning.compatible import Loss, Model, Settings, embed, train

__all__ = ["Loss", "Model", "Settings", "embed", "train"]
