"""Make a gallery of a folder of pictures, search it, and change its model from the first command to the last.

python examples/quickstart_files.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

import rmvdb
from terminal import empty_folder, run


class Colours:
    """A stand-in for a picture model: the colours of a grid of cells."""

    def __init__(self, cells):
        self.cells = cells

    def embed(self, items):
        small = [rmvdb.read_image(item).resize((self.cells, self.cells)) for item in items]
        return np.stack([np.asarray(picture, dtype=np.float32).ravel() - 127 for picture in small])


v1, v2 = Colours(cells=2), Colours(cells=4)


def make_photos(folder):
    folder.mkdir()
    random = np.random.default_rng(0)
    for at in range(240):
        pixels = random.integers(0, 160, (4, 4, 3))
        pixels[..., at % 3] += 90  # redder, greener or bluer
        Image.fromarray(pixels.astype(np.uint8)).resize((32, 32)).save(folder / f"{at}.png")


def search(photo):
    with rmvdb.connect(gallery="photos") as client:
        hits = client.search(photo, limit=3, filter='hue == "green"', output_fields=["hue"])
    print(f"  like {photo}: {', '.join(f'{hit.id}.png ({hit.distance:.2f})' for hit in hits)}", flush=True)


if __name__ == "__main__":
    with empty_folder():
        photos = Path("photos")
        make_photos(photos)
        run("rmvdb init")
        run("rmvdb model add v1 --embedder quickstart_files:v1")
        run("rmvdb gallery add photos --model v1 --source folder:photos/{id}.png")
        with rmvdb.connect(gallery="photos") as client:
            hues = ("red", "green", "blue")
            client.upsert([{"id": at, "item": photos / f"{at}.png", "hue": hues[at % 3]} for at in range(240)])
        search(photos / "7.png")
        run("rmvdb model add v2 --embedder quickstart_files:v2")
        run("rmvdb upgrade --from v1 --to v2", show=2)
        search(photos / "7.png")
        run("rmvdb cleanup --yes", show=2)
