"""The tree of exceptions in the docstring is the tree of classes."""

from __future__ import annotations

import inspect
import re

from rmvdb import errors


def test_the_tree_lists_every_class_below_its_base() -> None:
    lines = (re.fullmatch(r"([│├└─ ]*)(\w+) {2,}\S.*", line) for line in (errors.__doc__ or "").splitlines())
    above, told = list[str](), dict[str, str]()
    for found in filter(None, lines):
        depth = len(found[1]) // 4
        above[depth:] = [found[2]]
        told[found[2]] = above[depth - 1] if depth else "Exception"
    classes = {name: each for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__}
    assert told == {name: each.__bases__[0].__name__ for name, each in classes.items()}
