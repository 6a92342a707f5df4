"""Lines of the package, and how long its functions are: python tests/bench/size.py"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rmvdb"


def main() -> None:
    """Print the figures."""
    lines, lengths = 0, []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        lines += text.count("\n")
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        lengths += [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    ninetieth = statistics.quantiles(lengths, n=10)[-1]
    print(f"{lines} lines, {len(lengths)} functions, median {statistics.median(lengths):.0f} lines, 90 % under {ninetieth:.0f}")


if __name__ == "__main__":
    main()
