"""The kinds of items that a model takes, each with its probes: fixed items on which two embedders are compared.

The probes are the same on every machine and in every version of rmvdb. The command line reads the names of the kinds. So this
file imports numpy and PIL only when it makes pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image

    from rmvdb.types import Item

#: The kind of a model version's items.
Kind: TypeAlias = Literal["text", "image"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSpec:
    """The probes of one kind of items."""

    #: Returns `REQUIRED` items. An embedder must take them all in one batch.
    probes: Callable[[], list[Item]]
    #: Returns more items, which show whether a preprocessing has changed. An embedder need not take them.
    more: Callable[[], list[Item]]


#: How many probes an embedder must take.
REQUIRED = 4
_TEXTS = (
    "a photo of a red bicycle in front of a white wall",
    "Two dogs run along the beach at sunset.",
    "42",
    "The quick brown fox jumps over the lazy dog, and nobody minds.",
)
#: Accents and other scripts, white space, capitals, and a text so long that models cut it.
_MORE_TEXTS = (
    "  Straße, naïve café, piñata;\t東京タワー and Москва\n🚲  ",
    "ALL CAPITALS, mIxEd CaSe, don't-split_me: https://example.org/a?b=1&c=2",
    " ".join(f"Sentence {n} tells of a {n % 7}-day walk from hill {n} to river {n * 13 % 101}." for n in range(99)),
)
#: Widths and heights of pictures that a preprocessing must crop, shrink or enlarge.
_MORE_SIZES = ((512, 341), (160, 360), (48, 48))


def _pictures() -> list[Item]:
    import numpy as np
    from PIL import Image

    down, across = np.mgrid[0:224, 0:224].astype(np.uint32)
    pictures = (
        (down, across, (down + across) // 2),
        (255 * (down // 28 % 2 ^ across // 28 % 2), 255 * (across // 56 % 2), down),
        ((down - 112) ** 2 + (across - 112) ** 2 >> 6, 255 - across, 255 - down),
        # This noise comes from arithmetic, because generators of random numbers change from release to release.
        tuple((down * 224 + across + 1) * factor >> 13 for factor in (2654435761, 2246822519, 3266489917)),
    )
    return [Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8)) for channels in pictures]


def _picture(width: int, height: int) -> Image:
    """Compute a picture that has slow changes, edges and fine detail."""
    import numpy as np
    from PIL import Image

    down, across = np.mgrid[0:height, 0:width].astype(np.uint32)
    channels = (
        255 * across // width,
        255 * (down // 3 % 2 ^ across // 5 % 2),
        (down * width + across + 1) * 2654435761 >> 13,
    )
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


#: rmvdb tries the kinds in this order. Texts come first, because an embedder of texts may accept a picture. An embedder of
#: pictures accepts no text.
KINDS: Mapping[Kind, KindSpec] = {
    "text": KindSpec(probes=lambda: list(_TEXTS), more=lambda: list(_MORE_TEXTS)),
    "image": KindSpec(probes=_pictures, more=lambda: [_picture(*size) for size in _MORE_SIZES]),
}
