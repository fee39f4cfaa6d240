"""Versions of the code that decides a result, and of the packages that it runs under."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata, util
from operator import attrgetter
from pathlib import Path

from gpclml.errors import ArgumentError

__all__ = ["OtherCodeError", "check_code", "code_version", "function_name", "package_versions"]

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
            if attrgetter(qualname)(importlib.import_module(module)) is function:
                return f"{module}:{qualname}"
    raise ArgumentError(
        "function",
        repr(function),
        "a function that other processes can import",
        "Define it at the top level of a module that is imported, not run as a script.",
    )


def code_version(
    function: Callable, sources: Iterable[str | Path] = (), *, as_first_seen: bool = False
) -> str:
    """Hash of the sources that decide the result of a cell, 16 hexadecimal digits.

    It covers the Python and CSV files of ``gpclml``, the module of the function, and what
    ``sources`` names. Of Python files the statements count: docstrings, comments, layout and
    line ends do not change the hash, nor does the folder of the checkout.

    Args:
        function: The cell function; its name counts too, so that two functions of one
            module never share a result.
        sources: Further modules by dotted name (a package stands for all Python and CSV
            files beneath it), or paths of files.
        as_first_seen: Take each file as this process first saw it, for processes that may
            outlast an edit: what they have imported stays as it was.

    Raises:
        ArgumentError: If a source does not exist.
    """
    name = function_name(function)
    files: dict[str, Path] = {}
    for source in ("gpclml", name.partition(":")[0], *sources):
        files |= _files_of_path(source) if isinstance(source, Path) else _files_of_module(source)
    digest = _first_digest if as_first_seen else _digest
    total = hashlib.sha256(name.encode())
    for label, path in sorted(files.items()):
        total.update(hashlib.sha256(label.encode()).digest() + digest(path))
    return total.hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by name."""
    return {"python": platform.python_version()} | {name: _installed(name) for name in _PACKAGES}


class OtherCodeError(RuntimeError):
    """A worker of a cluster has other code than the driver; says what to do about it."""


def check_code(
    function: Callable, sources: Iterable[str | Path], driver: Mapping[str, str]
) -> None:
    """Compares the code and the packages of this process, a worker, with those of the driver.

    Args:
        function: The cell function.
        sources: As in :func:`code_version`.
        driver: The driver's :func:`package_versions`, and its version of the code as ``"code"``.

    Raises:
        OtherCodeError: If the process has other ones.
    """
    fix = "Bring every machine to the same code and packages and restart its workers."
    try:
        mine = {"code": code_version(function, sources, as_first_seen=True), **package_versions()}
    except ArgumentError as error:
        raise OtherCodeError(f"{error} {fix}") from None
    unlike = [name for name in driver if mine[name] != driver[name]]
    if unlike:
        listed = (f"{name} {mine[name]} here, {driver[name]} at the driver" for name in unlike)
        raise OtherCodeError(f"{', '.join(listed)}. {fix}")


def _digest(path: Path) -> bytes:
    data = path.read_bytes().replace(b"\r\n", b"\n")
    return _python_digest(data) if path.suffix == ".py" else hashlib.sha256(data).digest()


_first_digest = functools.cache(_digest)


@functools.lru_cache(maxsize=2000)
def _python_digest(source: bytes) -> bytes:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # else all of the text
        source = repr(_statements(ast.parse(source))).encode()
    return hashlib.sha256(source).digest()


def _statements(node: object) -> object:
    """A syntax tree without positions and without strings that are statements.

    Fields without a value are left out: which of them there are depends on Python's version.
    """
    if isinstance(node, list):
        return [_statements(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _statements(value)) for name, value in ast.iter_fields(node))
    return type(node).__name__, [field for field in fields if field[1] not in (None, [])]


def _is_docstring(node: object) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)


def _files_of_path(path: Path) -> dict[str, Path]:
    if not path.is_file():
        raise ArgumentError("sources", str(path), "the path of a file", "Name one that exists.")
    return {path.name: path}


def _files_of_module(name: str) -> dict[str, Path]:
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        fix = "Give dotted names of modules, or pathlib.Path objects for files."
        raise ArgumentError("sources", repr(name), "a Python module with a source file", fix)
    if spec.submodule_search_locations is None:
        return {name: Path(str(spec.origin))}
    return {
        f"{name}/{path.relative_to(root).as_posix()}": path
        for root in map(Path, spec.submodule_search_locations)
        for pattern in ("*.py", "*.csv")
        for path in root.rglob(pattern)
    }
