"""Size and words of the code: lines by room, names without content, comments.

```
python -m benchmarks.house            # the rooms of gpclml, then benchmarks and tests
python -m benchmarks.house --names    # the names without content and where they are
```
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pandas

ROOT = Path(__file__).parents[1]

EMPTY_NAMES = {
    "one",
    "part",
    "parts",
    "found",
    "own",
    "place",
    "rest",
    "item",
    "thing",
    "obj",
    "tmp",
}
EMPTY_STARTS = ("of_", "by_", "at_", "as_", "with_")

_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_lines(source: str) -> Counter[str]:
    """Lines of a file: all, those of code, of docstrings, and those that are a comment alone."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += token.line.strip().startswith("#")
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Counter(
        lines=len(source.splitlines()),
        code=len(code - docstrings),
        docstrings=len(docstrings),
        comments=comments,
    )


def assigned_names(source: str) -> Iterator[tuple[str, int]]:
    """Each name that is assigned, an argument, a function's or a class's, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def is_empty(name: str) -> bool:
    """Whether a name says nothing of what it holds."""
    return name.strip("_") in EMPTY_NAMES or name.lstrip("_").startswith(EMPTY_STARTS)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--names", action="store_true", help="print each name without content")
    arguments = parser.parse_args()
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for top in ("gpclml", "benchmarks", "tests"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            source = file.read_text()
            count = count_lines(source)
            names = list(assigned_names(source))
            count["names"] = len(names)
            count["empty"] = sum(name.strip("_") in EMPTY_NAMES for name, _ in names)
            starts = {name for name, _ in names if name.lstrip("_").startswith(EMPTY_STARTS)}
            count["of_, by_, ..."] = len(starts)
            rooms[f"{top}/{path.parts[1]}" if len(path.parts) > 2 else top] += count
            if arguments.names:
                for name, line in names:
                    if is_empty(name):
                        print(f"{path}:{line}: {name}")
    for room, count in list(rooms.items()):
        rooms[f"all of {room.split('/')[0]}"] += count
        if room.startswith("gpclml") and room != "gpclml/tables":
            rooms["gpclml without tables"] += count
    print(pandas.DataFrame.from_dict(rooms, orient="index").fillna(0).astype(int).to_string())


if __name__ == "__main__":
    main()
