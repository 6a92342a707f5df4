"""Train a new model whose queries can search the old model's gallery as it is. Needs scikit-learn: pip install '.[demo]'

python examples/compatible_training.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from rmvdb import metrics
from rmvdb.compatible import Model, Settings, embed, train
from rmvdb.types import Metric


def new_model(*, width, classes):
    """A small network with its classifier."""
    layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 32)]
    return Model(module=nn.Sequential(*layers), classifier=nn.Linear(32, classes, bias=False))


def quality(queries, gallery, items):
    """Search every item by one model among the others by the other model. Return the mAP in percent."""
    (q, labels), (g, _) = embed(queries.module, items), embed(gallery.module, items)
    distances = metrics.distances(q.numpy(), g.numpy(), metric=Metric.COSINE)
    np.fill_diagonal(distances, np.inf)  # no item finds itself
    relevant = (labels[:, None] == labels[None, :]).numpy()
    return 100 * metrics.mean(metrics.average_precision(distances, relevant))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    whole = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target).long())
    rows = np.random.default_rng(0).permutation(len(whole))
    few, many, searched = rows[:1000][digits.target[rows[:1000]] < 5], rows[:1000], rows[1000:]
    settings = Settings(epochs=20, lr=0.02, seed=0)

    old = new_model(width=32, classes=5)
    train(old, Subset(whole, few), settings=settings)
    print(f"old model, digits 0 to 4:       {quality(old, old, Subset(whole, searched)):.1f} mAP in its own gallery")
    for loss in ("plain", "ract"):
        new = new_model(width=128, classes=10)
        train(new, Subset(whole, many), loss=loss, old=old, settings=settings)
        own, across = (quality(new, gallery, Subset(whole, searched)) for gallery in (new, old))
        print(f"new model, all digits, {loss + ':':8}{own:.1f} mAP in its own gallery, {across:.1f} in the old model's")
