"""Versions of the code that decides a result, and of the packages that it runs under."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, util
from operator import attrgetter
from pathlib import Path

from gpclml.errors import ArgumentError

_PACKAGES = ("gpclml", "torch", "gpytorch", "botorch")


def function_name(function: Callable) -> str:
    """The name ``module:function`` under which any process can import a cell function.

    Raises:
        ArgumentError: If the function is not found there: a lambda, a nested function, a
            partial, or one defined in the script that is being run.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if module and qualname and module != "__main__" and "<" not in qualname:
        with contextlib.suppress(ImportError, AttributeError):
            # What a name finds may be another function, as after a decorator.
            if attrgetter(qualname)(importlib.import_module(module)) is function:
                return f"{module}:{qualname}"
    raise ArgumentError(
        "function",
        repr(function),
        "a function that other processes can import",
        "Define it at the top level of a module that is imported, not run as a script.",
    )


def code_version(*functions: Callable) -> str:
    """Hash of the code that decides what functions compute, 16 hexadecimal digits.

    It covers the Python and CSV files of ``gpclml`` and ``benchmarks.data``, and of other modules
    of the functions' own package the statements that their names lead to, in the function, in what
    it calls, in what that imports. What words or draws a result does not change it, nor do
    docstrings, comments, layout, line ends, or the folder of the checkout. A module that is
    imported under a name of its own counts as a whole.

    Args:
        *functions: The cell function, and others it depends on; their names count too, so that two
            functions of one module never share a result.

    Raises:
        ArgumentError: If a function cannot be imported.
    """
    names = [function_name(function) for function in functions]
    total = hashlib.sha256(" ".join(names).encode())
    for whole in ("gpclml", "benchmarks.data"):
        root = Path(str(util.find_spec(whole).origin)).parent  # pyright: ignore[reportOptionalMemberAccess]
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.csv")]):
            label, data = f"{whole}/{path.relative_to(root).as_posix()}", _source(path)
            if path.suffix == ".py":
                data = "\n".join(dumped for _, dumped in _statements(data)).encode()
            total.update(hashlib.sha256(label.encode()).digest() + hashlib.sha256(data).digest())
    for statement in _reached(names):
        total.update(hashlib.sha256(statement.encode()).digest())
    return total.hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by name."""
    return {"python": platform.python_version()} | {name: _installed(name) for name in _PACKAGES}


class OtherCodeError(RuntimeError):
    """A worker of a cluster has other code than the driver; says what to do about it."""


def check_code(functions: Sequence[Callable], driver: Mapping[str, str]) -> None:
    """Compares the code and the packages of this process, a worker, with those of the driver.

    Args:
        functions: As in :func:`code_version`.
        driver: The driver's :func:`package_versions`, and its version of the code as ``"code"``.

    Raises:
        OtherCodeError: If the process has other ones.
    """
    mine = _own_versions(tuple(functions))
    unlike = [
        f"{name} {mine[name]} here, {driver[name]} at the driver"
        for name in driver if mine[name] != driver[name]
    ]  # fmt: skip
    if unlike:
        fix = "Bring every machine to the same code and packages and restart its workers."
        raise OtherCodeError(f"{', '.join(unlike)}. {fix}")


@functools.cache
def _own_versions(functions: tuple[Callable, ...]) -> dict[str, str]:
    """Taken once in a process: what it has imported stays as it was, whatever is edited."""
    try:
        return {"code": code_version(*functions), **package_versions()}
    except ArgumentError as error:
        raise OtherCodeError(str(error)) from None


def _source(path: Path) -> bytes:
    # A checkout on Windows has other line ends and the same code.
    return path.read_bytes().replace(b"\r\n", b"\n")


@functools.lru_cache(maxsize=2000)
def _statements(source: bytes) -> list[tuple[ast.stmt, str]]:
    """The statements of a Python file, and these as text, without docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_string(statement)]  # pyright: ignore
    return [(statement, ast.dump(statement)) for statement in tree.body]


def _is_string(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


_ALL = "*"  # stands for every name of a module


def _reached(functions: Sequence[str]) -> list[str]:
    """The statements that the names of functions, ``"module:name"`` each, lead to."""
    pending = [(module, name) for module, _, name in (f.partition(":") for f in functions)]
    packages = {module.partition(".")[0] for module, _ in pending}
    seen, reached = set(pending), set[str]()
    while pending:
        module, name = pending.pop()
        path = _file_of_module(module)
        if path is None:  # a name of another module than those it was looked up in
            continue
        name = name.partition(".")[0]
        for statement, dumped in _statements(_source(path)):
            defined = _names_defined(statement)
            # What defines nothing, such as a call, runs at every import.
            if name not in (_ALL, *defined) and defined:
                continue
            uses = list(_names_used(statement, module))
            if isinstance(statement, ast.Import | ast.ImportFrom):
                # Of names that are imported together only that one counts.
                uses = [use for use, given in zip(uses, defined, strict=True) if given == name]
                # Another library's function under the same name is other code.
                reached |= {f"{module}: {name} is {use}" for use in uses}
            else:
                reached.add(f"{module}: {dumped}")
            new = {use for use in uses if use[0].partition(".")[0] in packages} - seen
            pending += new
            seen |= new
        if _file_of_module(f"{module}.{name}"):
            pending.append((f"{module}.{name}", _ALL))
    return sorted(reached)


def _names_defined(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module binds there."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    nodes = list(ast.walk(statement))
    # Variables of comprehensions are not the module's.
    loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    inner = {name for target in loops for name in ast.walk(target)}
    names = []
    for node in nodes:
        if isinstance(node, ast.alias):
            names.append((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in inner:
            names.append(node.id)
    return names


def _names_used(statement: ast.stmt, module: str) -> Iterator[tuple[str, str]]:
    """The names that a statement uses, each with the module in which it is looked up."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield module, node.id
        elif isinstance(node, ast.Import):
            yield from ((alias.name, _ALL) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)


def _file_of_module(name: str) -> Path | None:
    if name.startswith("benchmarks.data"):  # counts as a whole
        return None
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(str(spec.origin)) if spec is not None and spec.has_location else None
