"""The models of a stress run, which have little in common, and a source that makes a record's item from its own fields."""

from tests.support.project import MODELS

SOURCE = """

class Long(Embedder):
    def embed(self, items):
        lengths = [np.random.default_rng([7, *str(_id(each)).encode()]).normal() for each in items]
        return super().embed(items) * np.exp(0.2 * np.array(lengths, np.float32))[:, None]


class Stranger(Embedder):
    def __init__(self, name, dim):
        super().__init__(name, 20, dim)
        self.matrix[:8] = 0.0  # nothing of what a sees: a ψ from b to a starts low, and is served by a schedule


def a():
    return Long("a", 8, 16)


def b():
    return Stranger("b", 20)


class Things:
    def load(self, records):
        return {record.id: item(record.id, record.fields["edition"]) for record in records}


things = Things()
"""

#: models.py of a stress project.
TEXT = MODELS + SOURCE
