"""The reference: a table of names above each package, and links to our and to others' objects."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["on_env", "on_page_markdown", "other_projects", "public_names"]

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import as_markdown  # noqa: E402

_PACKAGE = re.compile(r"^::: (gpclml[\w.]*)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"(?<![\[`\w])`(?P<code>(?P<name>[A-Za-z_][\w.]*)(?:\([^`\n]*\))?)`(?![\]`])")
_RESULTS = ("Result", "Warning", "Error")  # what a package returns and raises comes last


def other_projects() -> dict[str, str]:
    """Where objects of other projects are documented, by the names that our code has for them."""
    found = {}
    projects = tomllib.loads(Path(__file__).with_name("objects.toml").read_text())
    for base, pages in projects.items():
        for page, names in pages.items():
            for name in names:
                package, _, last = name.rpartition(".")
                known = getattr(importlib.import_module(package), last)
                home = f"{getattr(known, '__module__', package)}.{last}"
                found[name] = base + page.format(name=name, home=home)
    return found


def public_names(package: str) -> list[str]:
    """Public names of a package, functions and classes first, what they return and raise last."""
    module = importlib.import_module(package)
    return sorted(module.__all__, key=lambda name: name.endswith(_RESULTS))


def on_env(env: Any, config: Any, **kwargs: Any) -> None:
    """Tells where other projects' objects are documented; mkdocs calls it."""
    for name, url in other_projects().items():
        config.plugins["autorefs"].register_url(name, url)


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Writes tables of names into the reference, and links into the guides; mkdocs calls it."""
    if page.file.src_uri.startswith("reference/"):
        return _PACKAGE.sub(lambda match: "\n".join(_package(match[1])), markdown)
    if "/" in page.file.src_uri:
        return markdown
    homes, parts = _homes(), _CODE_BLOCK.split(markdown)
    for k in range(0, len(parts), 2):  # the others are code
        parts[k] = "".join(_linked(line, homes) for line in parts[k].splitlines(keepends=True))
    return "".join(parts)


def _package(package: str) -> Iterator[str]:
    if package == "gpclml":  # what it offers, by the pages that describe it
        yield from _overview()
        return
    names = public_names(package)
    yield f"::: {package}\n    options: {{members: false, show_root_full_path: true}}\n"
    yield from _table({name: f"{package}.{name}" for name in names})
    for name in names:
        yield f"::: {package}.{name}\n    options: {{heading_level: 3}}\n"


def _overview() -> Iterator[str]:
    offered = {name: _homes()[name] for name in importlib.import_module("gpclml").__all__}
    docs = Path(__file__).parents[1]
    for name in re.findall(r"reference/(?!index)(\w+\.md)", (docs.parent / "mkdocs.yml").read_text()):
        text = (docs / "reference" / name).read_text()
        described = _PACKAGE.findall(text)
        here = {n: path for n, path in offered.items() if path.rpartition(".")[0] in described}
        yield f"\n## [{text.splitlines()[0].removeprefix('# ')}]({name})\n"
        yield f"`{'`, `'.join(described)}`"
        yield from _table(here) if here else ()


def _table(paths: dict[str, str]) -> Iterator[str]:
    yield '\n<div class="stacked" markdown>\n\n| name | what it is |\n|---|---|'
    for name, path in paths.items():
        package, _, last = path.rpartition(".")
        known = getattr(importlib.import_module(package), last)
        described = inspect.isclass(known) or inspect.isroutine(known)
        first = (inspect.getdoc(known) or "").split("\n\n")[0] if described else ""
        line = as_markdown(" ".join(first.split())).replace("|", "\\|")
        yield f"| [`{name}`][{path}] | {line} |"
    yield "\n</div>\n"


def _homes() -> dict[str, str]:
    """What guides name: our most used names, and objects of other projects, by both their names."""
    import gpclml

    homes = {}
    for path in other_projects():
        homes[path] = path
        if path.startswith(("gpytorch", "botorch")):
            homes[path.rpartition(".")[2]] = path
    for name in gpclml.__all__:
        known = getattr(gpclml, name)
        package = ".".join(known.__module__.split(".")[:2])
        homes[name] = homes[f"{package}.{name}"] = f"{package}.{name}"
    return homes


def _linked(line: str, homes: dict[str, str]) -> str:
    """A line of a guide with links from names to where they are described, each once a page."""
    if line.startswith(("#", ":::")):
        return line

    def link(match: re.Match[str]) -> str:
        if match["code"].isalpha() and match["code"].islower():
            return match[0]  # `compare` may be the command, and `load` a method
        path = homes.pop(match["name"], None)
        return match[0] if path is None else f"[`{match['code']}`][{path}]"

    return _NAMED.sub(link, line)
