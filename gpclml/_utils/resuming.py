"""Resuming a training from a checkpoint: draws, the optimizer's state, and whether data fit.

Digests of data and settings tell whether a checkpoint is of the training that goes on.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import ArgumentError, DataError

_KEY = "_extra_state"  # under which torch stores what get_extra_state returns


@dataclass
class _Course:
    """What has been done of a training; the names of the fields are those of its checkpoint."""

    objectives: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: int = 0
    seconds: float = 0.0

    @property
    def looks_since_best(self) -> int:
        """Number of looks after the one of the best score."""
        return len(self.scores) - 1 - self.scores.index(max(self.scores)) if self.scores else 0


class ResumableRun:
    """State and course of a training, which goes on from its checkpoint bit for bit.

    The best state is that of the module ``kept``, the objective or its model. The generator is
    that of the training itself; an objective's own draws are in its state.
    """

    def __init__(
        self,
        kind: str,
        mll: torch.nn.Module,
        kept: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        generator: torch.Generator | None = None,
    ) -> None:
        self.course = _Course()
        self.best: dict[str, Any] | None = None
        self._kind, self._mll, self._kept = kind, mll, kept
        self._optimizers, self._generator = optimizers, generator
        self._path: str | os.PathLike[str] | None = None
        self._whole: dict[str, Any] = {}

    def open(
        self, path: str | os.PathLike[str] | None, decided_by: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Takes a file to save to, and goes on from it where it is there.

        ``decided_by`` says what decides the course; where it differs a DataError is raised.
        """
        if path is not None:
            self._path, self._decided_by = path, dict(decided_by())
            if os.path.exists(path):
                self._read(path)
        self._start = time.perf_counter() - self.course.seconds

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within the block an interrupt saves what there was after the last whole step."""
        try:
            yield
        except KeyboardInterrupt:
            if self._whole:
                self._whole["course"]["seconds"] = time.perf_counter() - self._start
                self._write(self._whole)
            raise

    def begin_step(self) -> None:
        """Remembers where the training is."""
        if self._path is not None:
            self._whole = self._content()

    def save(self) -> None:
        """Notes the time, and saves the training if there is a file."""
        self.course.seconds = time.perf_counter() - self._start
        if self._path is not None:
            self._write(self._content())

    def note(self, score: float) -> None:
        """Notes a score after the last step, and the state if it is the best one."""
        course, done = self.course, len(self.course.objectives)
        if score > max(course.scores, default=-math.inf):
            course.best, self.best = done, copied_state(self._kept)
        course.looks.append(done)
        course.scores.append(score)

    def keep_best(self) -> None:
        """Puts back the best state; without a look the current one stays."""
        self.course.seconds = time.perf_counter() - self._start
        if self.best is None:
            self.course.best = len(self.course.objectives)
        else:
            self._kept.load_state_dict(self.best)

    def _content(self) -> dict[str, Any]:
        return {
            "state": copied_state(self._mll),
            "best": self.best,
            "optimizers": [copy.deepcopy(one.state_dict()) for one in self._optimizers],
            "generator": None if self._generator is None else self._generator.get_state(),
            "course": asdict(self.course),
        }

    def _write(self, content: dict[str, Any]) -> None:
        assert self._path is not None
        write_checkpoint(self._path, self._kind, {**content, "fingerprint": self._decided_by})

    def _read(self, path: str | os.PathLike[str]) -> None:
        """A DataError, before any change, where the file is not of this training."""
        required = {
            "state": dict, "best": dict if self.best else (dict, type(None)), "optimizers": list,
            "generator": Tensor if self._generator else type(None), "course": dict,
            "fingerprint": dict,
        }  # fmt: skip
        device = next(self._kept.parameters()).device
        content = read_checkpoint(path, self._kind, device, required)
        check_state(path, self._mll, content["state"])
        if content["best"] is not None:
            check_state(path, self._kept, content["best"])
        _check_fingerprint(path, content["fingerprint"], self._decided_by)
        try:
            for name, own in vars(self.course).items():
                types = list if isinstance(own, list) else (int, float)
                if not isinstance(content["course"].get(name), types):
                    raise TypeError(f"no {name} of the training")
            course = _Course(**content["course"])
            for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            if self._generator is not None:
                self._generator.set_state(content["generator"].cpu())
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"checkpoint: {path} does not hold a training that can go on ({error}). Give "
                "another file to start anew."
            ) from error
        self._mll.load_state_dict(content["state"])
        self.best, self.course = content["best"], course


def copied_state(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of the module's state, which training the module does not change."""
    state = module.state_dict()
    for name, value in state.items():
        state[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return state


def _check_fingerprint(
    path: str | os.PathLike[str], stored: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Raises a DataError, which names all differences, where it is of another training."""
    missing = object()
    unlike = [
        name
        for name in [*own, *(name for name in stored if name not in own)]
        if stored.get(name, missing) != own.get(name, missing)
    ]
    if unlike:
        told = ", ".join(
            f"{name} ({stored.get(name)!r} there, {own.get(name)!r} here)"
            if all(len(repr(part.get(name))) < 40 for part in (stored, own))
            else name
            for name in unlike
        )
        raise DataError(
            f"checkpoint: {path} is of a training that differs in {told}. Give data and settings "
            "as they were to resume it, with the release that wrote it if names of classes changed "
            "since, or another file to start again."
        )


def check_state(
    path: str | os.PathLike[str], module: torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Raises a DataError where a stored ``state_dict`` has other entries than a module's."""
    own = module.state_dict()
    unlike = sorted(own.keys() ^ state.keys()) or [
        f"{name}: {tuple(getattr(state[name], 'shape', ()))} stored, {tuple(value.shape)} here"
        for name, value in own.items()
        if isinstance(value, Tensor) and getattr(state[name], "shape", None) != value.shape
    ]
    if unlike:
        raise DataError(
            f"path: {path} is a checkpoint of another architecture or objective "
            f"({', '.join(unlike[:3])}). Build model and objective as they were when they were "
            "trained, or give another file."
        )


class ResumableDraws(torch.nn.Module):
    """Base class of modules that draw from ``self._generator`` and resume their draws.

    The state of the generator is part of ``state_dict()``. A ``state_dict`` without it, from
    another objective, can be loaded too; the draws then continue from the module's own generator.
    """

    _generator: torch.Generator

    def get_extra_state(self) -> Tensor:
        """The state of the generator, so that a resumed training draws the same numbers."""
        return self._generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restores the state of the generator; raises an ArgumentError for anything else."""
        try:
            self._generator.set_state(state.cpu())
        except (AttributeError, RuntimeError, TypeError) as error:
            shape = f" of shape {tuple(state.shape)}" if isinstance(state, Tensor) else ""
            raise ArgumentError(
                "state_dict", f"{_KEY}: a {type(state).__name__}{shape}",
                "the state of a torch.Generator of the CPU",
                "Leave the entry out to start the draws from the seed.",
            ) from error  # fmt: skip

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.setdefault(prefix + _KEY, self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def digest(value: Any) -> str:
    """The SHA-256 of a value, the same in every process and on every device.

    Mappings enter in the order of their keys' texts, other objects by class and public attributes.
    """
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def versions_of(module: torch.nn.Module) -> tuple[tuple[int, int, int], ...]:
    """Which tensors parameters and buffers are, where they are stored, and how often they changed.

    Cheap, and another value wherever they may have changed, except by a write through ``.data``,
    which PyTorch does not count.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    return tuple((id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in tensors)


def module_classes(module: torch.nn.Module) -> list[str]:
    """The classes of a module and of all its parts, by name."""
    return [f"{name}: {type(part).__qualname__}" for name, part in module.named_modules()]


def _feed(found: Any, value: Any) -> None:
    # Each value comes with its type and length, so that no two sequences of values coincide.
    if isinstance(value, Tensor):
        own = value.detach().cpu().contiguous()
        _feed(found, f"{own.dtype} {tuple(own.shape)}")
        found.update(own.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        text = repr(value).encode()
        found.update(f"{type(value).__name__} {len(text)} ".encode() + text)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=repr):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, (list, tuple, set, frozenset)):
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        found.update(f"sequence {len(entries)} ".encode())
        for entry in entries:
            _feed(found, entry)
    elif isinstance(value, torch.Generator):
        _feed(found, value.get_state())
    elif hasattr(value, "__dict__") and not callable(value):
        _feed(found, type(value).__qualname__)
        _feed(found, {name: own for name, own in vars(value).items() if name[0] != "_"})
    else:
        _feed(found, f"{type(value).__qualname__} {getattr(value, '__qualname__', value)}")
