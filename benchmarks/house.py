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
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pandas

ROOT = Path(__file__).parents[1]

EMPTY_NAMES = re.compile("_*(one|parts?|found|own|place|rest|item|thing|obj|tmp)_*")
EMPTY_STARTS = re.compile("_*(of|by|at|as|with)_")

_COLUMNS = ["lines", "code", "docstrings", "comments", "names", "of_, by_, ...", "empty"]
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
    lines, code_lines = len(source.splitlines()), len(code - docstrings)
    return Counter(lines=lines, code=code_lines, docstrings=len(docstrings), comments=comments)


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
    return bool(EMPTY_NAMES.fullmatch(name) or EMPTY_STARTS.match(name))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--names", action="store_true", help="print each name without content")
    arguments = parser.parse_args()
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for top in ("gpclml", "benchmarks", "tests"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path, source = file.relative_to(ROOT), file.read_text()
            count, names = count_lines(source), list(assigned_names(source))
            count["names"] = len(names)
            count["empty"] = sum(EMPTY_NAMES.fullmatch(name) is not None for name, _ in names)
            count["of_, by_, ..."] = len({name for name, _ in names if EMPTY_STARTS.match(name)})
            rooms[f"{top}/{path.parts[1]}" if len(path.parts) > 2 else top] += count
            if arguments.names:
                for name, line in names:
                    if is_empty(name):
                        print(f"{path}:{line}: {name}")
    for room, count in list(rooms.items()):
        rooms[f"all of {room.split('/')[0]}"] += count
        if room.startswith("gpclml") and room != "gpclml/tables":
            rooms["gpclml without tables"] += count
    table = pandas.DataFrame.from_dict(rooms, orient="index")
    table = table.reindex(columns=_COLUMNS)  # a sum of counters leaves out what is zero
    print(table.fillna(0).astype(int).to_string())


if __name__ == "__main__":
    main()
