"""The models of a stress run: those of the tests' projects, and a source that makes a record's item from its own fields."""

from tests.support.project import MODELS

SOURCE = """

def a():
    return Embedder("a", 16, 16)


def b():
    return Embedder("b", 16, 20)

class Things:
    def load(self, records):
        return {record.id: item(record.id, record.fields["edition"]) for record in records}


things = Things()
"""

#: models.py of a stress project.
TEXT = MODELS + SOURCE
