"""A process by name, so that another can tell whether it still lives."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process"]


@dataclass(frozen=True)
class Process:
    """A process on some machine.

    Args:
        host: The machine and its process-id namespace, within which ``pid`` has a meaning.
        pid: Process id.
        started: When the process started, so that a reused id is not taken for it; empty
            where the system does not tell.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Process:
        """This process."""
        return cls(_host(), os.getpid(), _start_of(os.getpid()) or "")

    def lives(self) -> bool | None:
        """Whether the process runs; None if that cannot be told from this machine."""
        if self.host != _host() or not self.started:
            return None
        return _start_of(self.pid) == self.started


def _host() -> str:
    """This machine; containers that share its name differ in their process ids."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process started; None if there is none or the system does not tell."""
    if Path("/proc/self/stat").exists():
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        dead = fields[0] in "ZX"  # ended, and its parent has not asked for the exit code yet
        return None if dead else f"{boot} {fields[19]}"
    if os.name == "posix":
        command = ["ps", "-p", str(pid), "-o", "lstart="]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None
