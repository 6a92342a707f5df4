"""The papers' networks, and the pictures and the loss that they learn by."""

from __future__ import annotations

import pytest
import torch

from examples.paper_tables import models, simclr
from examples.paper_tables.backbones import Backbone
from rmvdb.errors import UnknownName


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "small", "small-wide"])
def test_every_backbone_makes_embeddings_of_bytes(name: str) -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        vectors = Backbone(name, dim=16).eval()(images)
    assert vectors.shape == (2, 16)
    assert vectors.dtype == torch.float32
    assert torch.isfinite(vectors).all()


def test_resnets_have_the_published_number_of_weights() -> None:
    counts = {name: sum(each.numel() for each in Backbone(name, dim=100).parameters()) for name in ("resnet18", "resnet50")}
    assert counts == {"resnet18": 11_220_132, "resnet50": 23_705_252}


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(UnknownName, match="resnet18"):
        Backbone("resnet81", dim=8)


def test_pictures_are_shifted_by_a_few_pixels_and_only_mirrored_where_that_keeps_their_class() -> None:
    torch.manual_seed(0)
    ramp = torch.arange(1, 33, dtype=torch.uint8).expand(64, 3, 32, 32)
    plain, mirrored = (models.shifted(ramp, mirrored=mirrored) for mirrored in (False, True))
    middle = plain[:, 0, 16, 16].int() - 17
    assert middle.abs().max() <= models.SHIFT
    assert len(middle.unique()) > 3
    assert (plain[:, 0, 16, 20] > plain[:, 0, 16, 12]).all()
    falls = (mirrored[:, 0, 16, 20] < mirrored[:, 0, 16, 12]).float().mean()
    assert 0.2 < falls < 0.8


def test_nt_xent_is_the_mean_over_both_views_of_every_picture() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(6, 4, dtype=torch.float64)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    slow = 0.0
    for i in range(6):
        others = [torch.exp(unit[i] @ unit[k] / 0.5) for k in range(6) if k != i]
        slow -= torch.log(torch.exp(unit[i] @ unit[(i + 3) % 6] / 0.5) / sum(others))
    assert simclr.nt_xent(vectors, temperature=0.5).item() == pytest.approx((slow / 6).item(), abs=1e-6)


def test_views_differ_and_stay_pictures() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    one, other = simclr.view(images, mirrored=True), simclr.view(images, mirrored=True)
    assert one.dtype == torch.uint8
    assert one.shape == images.shape
    assert (one != other).float().mean() > 0.5
