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
            # What a name finds may be another function, as after a decorator.
            if attrgetter(qualname)(importlib.import_module(module)) is function:
                return f"{module}:{qualname}"
    raise ArgumentError(
        "function",
        repr(function),
        "a function that other processes can import",
        "Define it at the top level of a module that is imported, not run as a script.",
    )


def code_version(function: Callable, sources: Iterable[str] = ()) -> str:
    """Hash of the sources that decide the result of a cell, 16 hexadecimal digits.

    It covers the Python and CSV files of ``gpclml`` and ``benchmarks.data``, the module of the
    function, and what ``sources`` names. Of Python files the statements count: docstrings,
    comments, layout and line ends do not change the hash, nor does the folder of the checkout.

    Args:
        function: The cell function; its name counts too, so that two functions of one
            module never share a result.
        sources: Further modules by dotted name; a package stands for all Python and CSV
            files beneath it.

    Raises:
        ArgumentError: If a source does not exist.
    """
    name = function_name(function)
    files: dict[str, Path] = {}
    for source in ("gpclml", "benchmarks.data", name.partition(":")[0], *sources):
        files |= _files_of_module(source)
    total = hashlib.sha256(name.encode())
    for label, path in sorted(files.items()):
        # A checkout on Windows has other line ends and the same code.
        data = path.read_bytes().replace(b"\r\n", b"\n")
        data = _statements(data) if path.suffix == ".py" else data
        total.update(hashlib.sha256(label.encode()).digest() + hashlib.sha256(data).digest())
    return total.hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by name."""
    return {"python": platform.python_version()} | {name: _installed(name) for name in _PACKAGES}


class OtherCodeError(RuntimeError):
    """A worker of a cluster has other code than the driver; says what to do about it."""


def check_code(function: Callable, sources: Iterable[str], driver: Mapping[str, str]) -> None:
    """Compares the code and the packages of this process, a worker, with those of the driver.

    Args:
        function: The cell function.
        sources: As in :func:`code_version`.
        driver: The driver's :func:`package_versions`, and its version of the code as ``"code"``.

    Raises:
        OtherCodeError: If the process has other ones.
    """
    mine = _own_versions(function, tuple(sources))
    unlike = [
        f"{name} {mine[name]} here, {driver[name]} at the driver"
        for name in driver if mine[name] != driver[name]
    ]  # fmt: skip
    if unlike:
        fix = "Bring every machine to the same code and packages and restart its workers."
        raise OtherCodeError(f"{', '.join(unlike)}. {fix}")


@functools.cache
def _own_versions(function: Callable, sources: tuple[str, ...]) -> dict[str, str]:
    """Taken once in a process: what it has imported stays as it was, whatever is edited."""
    try:
        return {"code": code_version(function, sources), **package_versions()}
    except ArgumentError as error:
        raise OtherCodeError(str(error)) from None


@functools.lru_cache(maxsize=2000)
def _statements(source: bytes) -> bytes:
    """The statements of a Python file without its docstrings."""
    # By the syntax tree: comments and layout are not in it.
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_string(statement)]  # pyright: ignore
    return ast.dump(tree).encode()


def _is_string(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)


def _files_of_module(name: str) -> dict[str, Path]:
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        fix = "Give dotted names of modules."
        raise ArgumentError("sources", repr(name), "a Python module with a source file", fix)
    if spec.submodule_search_locations is None:
        return {name: Path(str(spec.origin))}
    return {
        f"{name}/{path.relative_to(root).as_posix()}": path
        for root in map(Path, spec.submodule_search_locations)
        for pattern in ("*.py", "*.csv")
        for path in root.rglob(pattern)
    }
