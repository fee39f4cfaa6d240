"""Refuses every socket that leaves this machine, in the process that imports it.

``tests/conftest.py`` loads this file into the process of the tests and puts its folder at the head
of ``PYTHONPATH``, so that a Python process started by a test imports it too. An audit hook sees
what a patched ``socket`` module does not: calls by another name, from a thread, or from C code
that goes through Python's own sockets. It does not see libraries with sockets of their own (Gloo)
or programs that are not Python, nor the look-up inside ``connect`` to a name: for these the tests
also run in ``.ci/run`` with the network off.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import Any

refusals: list[str] = []
"""What was refused, in words: the fixture that reads it fails a test that hides the error."""


class NetworkRefusedError(RuntimeError):
    """A test would have left this machine. No ``OSError``: code that copes with those hides it."""


def _is_loopback(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):  # a wildcard looks nothing up; binding to it is refused
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _leaves(event: str, args: tuple[Any, ...]) -> bool:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
        connection, address = args
        if address is None or connection.family == getattr(socket, "AF_UNIX", None):
            return False
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return True
        return not address[0] or not _is_loopback(address[0])
    if event == "socket.getnameinfo":
        return not _is_loopback(args[0][0])
    return not _is_loopback(args[0])


_WATCHED = {
    "socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind",
    "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
}  # fmt: skip


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event in _WATCHED and _leaves(event, args):
        where = args[1] if isinstance(args[0], socket.SocketType) else args[0]
        refusals.append(f"{event} to {where!r}")
        raise NetworkRefusedError(
            f"{refusals[-1]}: tests reach this machine alone. Serve it on 127.0.0.1, or let the "
            "test write a small file of its own."
        )


sys.addaudithook(_refuse)
