"""What a process has: memory of devices, random state, a terminal for progress, settings."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpytorch.settings
import linear_operator.settings
import psutil
import torch
from torch import Tensor

from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    from tqdm import tqdm


@contextmanager
def seeded_globally(generator: torch.Generator, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gives PyTorch's global generators a seed from this one, and afterwards their old state.

    These are the generators of the CPU and of the tensors' GPUs. ``torch.manual_seed`` would change
    those of all GPUs.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    gpus = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):
        for source in [torch.default_generator, *(torch.cuda.default_generators[i] for i in gpus)]:
            source.manual_seed(seed)
        yield


_FEW = 2**28  # bytes that a GPU is not asked about

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory(device: torch.device) -> int:
    """Bytes of memory of a CPU; of a GPU those that are free or kept for PyTorch's next tensors.

    A CPU's free memory changes from one moment to the next, so all of it counts.
    """
    # PyTorch keeps memory that it has freed, which the driver counts as taken.
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return _memory_of_the_machine()


@cache
def _memory_of_the_machine() -> int:
    """Memory of the machine or its container in bytes, which is asked once and does not change."""
    total = psutil.virtual_memory().total
    # A container may have less than the machine.
    for name in _LIMITS:
        path = Path(name)
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


def fits(needed: int, device: torch.device) -> bool:
    """Whether a number of bytes fits; on a GPU small numbers are not checked."""
    return (device.type == "cuda" and needed <= _FEW) or needed <= available_memory(device)


def check_memory(
    argument: str,
    got: object,
    numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    suggestion: str,
) -> None:
    """Raises an ArgumentError, with both figures, where numbers do not fit into memory."""
    needed = numbers * dtype.itemsize
    if not fits(needed, device):
        there = available_memory(device)
        gib = 2**30
        raise ArgumentError(
            argument, f"{got}, which needs {needed / gib:.1f} GiB",
            f"at most {there / gib:.1f} GiB, what the {device.type} has", suggestion,
        )  # fmt: skip


def progress_bar(
    steps: Iterable[Any] | None = None, *, progress: bool | None, **options: Any
) -> tqdm:
    """A bar of tqdm, which takes the options; it is hidden where none is to be shown.

    In a notebook it is tqdm's own for notebooks, or a line of text where ipywidgets is missing.
    """
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # of the missing ipywidgets
        from tqdm.auto import tqdm

    return tqdm(steps, disable=not shows_progress(progress), **options)


def shows_progress(progress: bool | None) -> bool:
    """Whether to show a progress bar on standard error; None: on a terminal and in a notebook."""
    if progress is not None:
        return progress
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


def load_botorch() -> None:
    """Imports BoTorch, if it is not imported yet, and leaves GPyTorch's settings as they are.

    A first import of BoTorch turns off GPyTorch's fast solves and raises the sizes up to which
    matrices are factored, for the whole process. Nobody expects that of a fit that only uses
    BoTorch's optimizers. A later ``import botorch`` does not change them either, since Python runs
    a module once.
    """
    if "botorch" in sys.modules:
        return
    # Settings are attributes of classes, of which BoTorch's import sets some.
    modules = gpytorch.settings, linear_operator.settings
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    before = {kind: dict(vars(kind)) for kind in kinds}
    try:
        importlib.import_module("botorch")
    finally:
        for kind, attributes in before.items():
            for name in vars(kind).keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)
