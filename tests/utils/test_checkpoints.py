"""Checkpoints: no damage goes unseen, none that is of something else is gone on with."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint_files import (
    WRITERS,
    data,
    laplace,
    save_model,
    train_online,
    train_tasks,
    transfer,
)

from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml._utils.resuming import digest
from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.curvature import Diagonal, Kronecker
from gpclml.errors import DataError, UnsupportedError
from gpclml.meta import PeriodicTasks, load_model
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

FLIPS = 340  # of each of the three kinds


def flipped(raw, bit):
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_refused_or_the_same(path, kind, expected):
    try:
        content = read_checkpoint(path, kind)
    except DataError:
        return
    assert digest(content) == expected


@pytest.mark.parametrize("kind", WRITERS)
def test_no_flipped_bit_changes_what_is_read(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    raw, expected = path.read_bytes(), digest(read_checkpoint(path, kind))
    for bit in random.Random(kind).sample(range(8 * len(raw)), FLIPS):
        path.write_bytes(flipped(raw, bit))
        assert_refused_or_the_same(path, kind, expected)


@pytest.mark.parametrize("kind", WRITERS)
def test_files_cut_short_and_grown_are_refused_or_sound(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    raw, expected = path.read_bytes(), digest(read_checkpoint(path, kind))
    for cut in [0, 1, 4, 30, len(raw) // 2, len(raw) - 22, len(raw) - 1]:
        path.write_bytes(raw[:cut])
        with pytest.raises(DataError):
            read_checkpoint(path, kind)
    path.write_bytes(raw + b"\0")
    assert_refused_or_the_same(path, kind, expected)


def test_checkpoints_are_files_of_torch_load(tmp_path):
    path = tmp_path / "a.pt"
    save_model(path)
    assert digest(torch.load(path, weights_only=True)) == digest(
        read_checkpoint(path, "gpclml.GPRegression")
    )


RESUMED = {
    "gpclml.GPRegression": GPRegression.load,
    "gpclml.OnlineFit": train_online,
    "gpclml.DeepKernelTransfer": train_tasks,
}


@pytest.mark.parametrize("kind", RESUMED)
def test_missing_entries_are_told(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    content = torch.load(path, weights_only=True)
    del content["format"], content["version"]
    entries = [(content, name) for name in content]
    entries += [(part, name) for part in content.values() if isinstance(part, dict)
                for name in part]  # fmt: skip
    for part, name in entries:
        if name.endswith("_bound"):  # of constraints, for which GPyTorch takes its defaults
            continue
        kept = part.pop(name)
        write_checkpoint(path, kind, content)
        part[name] = kept
        with pytest.raises(DataError, match=r"a\.pt"):
            RESUMED[kind](path)


@pytest.mark.parametrize("kind", RESUMED)
def test_entries_of_another_type_are_told(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    content = torch.load(path, weights_only=True)
    del content["format"], content["version"]
    for name in content:
        write_checkpoint(path, kind, content | {name: 7})
        with pytest.raises(DataError, match=f"a int for '{name}'"):
            RESUMED[kind](path)


OTHERS = {
    "train_x": lambda: {"x": data()[0] + 1e-9},
    "train_y": lambda: {"y": data()[1].roll(1)},
    "objective": lambda: {"mll": laplace(curvature=Diagonal())},
    "seed": lambda: {"seed": 1},
    "lr": lambda: {"lr": 0.5},
    "final_lr": lambda: {"final_lr": 1e-4},
    "hyper_lr": lambda: {"hyper_lr": 0.2},
    "hyper_steps": lambda: {"hyper_steps": 3},
    "batch_size": lambda: {"batch_size": 20},
    "burn_in": lambda: {"burn_in": 2},
    "every": lambda: {"every": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_online_training_with_something_else_does_not_go_on(tmp_path, name):
    path = tmp_path / "a.pt"
    train_online(path)
    raw = path.read_bytes()
    with pytest.raises(DataError, match=f"differs in {name}( |, |\\.)") as caught:
        train_online(path, **{"epochs": 5} | OTHERS[name]())
    assert ("0 there, 1 here" in str(caught.value)) == (name == "seed")
    assert path.read_bytes() == raw
    train_online(path, epochs=5)


def test_with_a_falling_rate_the_number_of_epochs_counts(tmp_path):
    path = tmp_path / "a.pt"
    train_online(path, final_lr=1e-4)
    with pytest.raises(DataError, match=r"differs in epochs \(3 there, 5 here\)"):
        train_online(path, final_lr=1e-4, epochs=5)


def test_all_that_differs_is_named(tmp_path):
    path = tmp_path / "a.pt"
    train_online(path)
    with pytest.raises(DataError, match=r"differs in train_y, lr .*, seed "):
        train_online(path, y=data()[1] + 1, lr=0.5, seed=3)


def another_conditioning(conditioning=None):
    mll, conditioning = transfer(), conditioning or LastPoints(m=2)
    return ConditionalMarginalLogLikelihood(mll.likelihood, mll.model, conditioning)


OF_BEFORE = {
    "gpclml.OnlineFit": lambda: laplace(curvature=type("OfBefore", (Kronecker,), {})()),
    "gpclml.DeepKernelTransfer": lambda: another_conditioning(
        type("OfBefore", (RandomHoldout,), {})(0.3)
    ),
}


@pytest.mark.parametrize("kind", OF_BEFORE)
def test_a_class_that_had_another_name_is_refused_with_what_to_do(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path, OF_BEFORE[kind]())
    raw = path.read_bytes()
    with pytest.raises(DataError, match=r"differs in objective\. .* the release that wrote it"):
        WRITERS[kind](path)
    assert path.read_bytes() == raw


OTHER_TASKS = {
    "tasks": lambda: {"tasks": PeriodicTasks(5, 6, seed=3)},
    "validation": lambda: {"validation": None},
    "objective": lambda: {"mll": another_conditioning()},
    "lr": lambda: {"lr": 0.5},
    "tasks_per_step": lambda: {"tasks_per_step": 2},
    "validation_tasks": lambda: {"validation_tasks": 3},
    "look_every": lambda: {"look_every": 1},
}


@pytest.mark.parametrize("name", OTHER_TASKS)
def test_a_training_on_other_tasks_does_not_go_on(tmp_path, name):
    path = tmp_path / "a.pt"
    train_tasks(path)
    with pytest.raises(DataError, match=f"differs in {name}( |, |\\.)"):
        train_tasks(path, **{"steps": 5} | OTHER_TASKS[name]())
    train_tasks(path, steps=5)
    load_model(transfer().model, path)


class _Full:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_full_disks_are_said_so_and_leave_what_was_there(tmp_path, monkeypatch, share):
    path = tmp_path / "a.pt"
    save_model(path)
    raw = path.read_bytes()
    room = int(share * len(raw))
    opened = lambda *args: _Full(open(*args), room)  # noqa: E731, SIM115
    monkeypatch.setattr("gpclml._utils.files.open", opened, raising=False)
    with pytest.raises(DataError, match=r"cannot write .*a\.pt .*No space left") as caught:
        save_model(path)
    assert "disk" in str(caught.value)
    assert path.read_bytes() == raw
    assert list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from gpclml._utils.files import write_checkpoint
from gpclml.errors import DataError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
write_checkpoint(path, "a kind", {"x": torch.zeros(10)})
raw = path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_checkpoint(path, "a kind", {"x": torch.zeros(100_000)})
except DataError as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError
assert path.read_bytes() == raw
assert list(path.parent.iterdir()) == [path]
"""


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_file_that_the_system_does_not_let_grow(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.pt")]
    subprocess.run(command, check=True)


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    path = tmp_path / "a.pt"
    for entry in [object(), torch.eye(2).to_sparse(), random.Random, {1, 2}]:
        with pytest.raises(UnsupportedError, match=r"content\['a'\]\[0\]"):
            write_checkpoint(path, "a kind", {"a": [entry]})
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_stored_as_those_of_python(tmp_path):
    content = {"a": [np.int64(3), np.float32(0.5), np.bool_(True), np.str_("b"), np.float64(0.1)]}
    write_checkpoint(tmp_path / "a.pt", "a kind", content)
    found = read_checkpoint(tmp_path / "a.pt", "a kind")["a"]
    assert found == [3, 0.5, True, "b", 0.1]
    assert [type(one) for one in found] == [int, float, bool, str, float]


def test_tensors_are_stored_as_what_they_show(tmp_path):
    path = tmp_path / "a.pt"
    many, shared = torch.arange(100_000.0), torch.arange(50_000.0)
    content = {
        "part": many[3:5],
        "repeated": torch.ones(1).expand(300, 300),
        "turned": many[:6].view(2, 3).T,
        "one": shared,
        "other": shared,
        "state": torch.nn.BatchNorm1d(3).state_dict(),
    }
    write_checkpoint(path, "a kind", content)
    found = read_checkpoint(path, "a kind")
    assert 200_000 + 360_000 < path.stat().st_size < 200_000 + 360_000 + 20_000
    for name, entry in content.items():
        assert digest(found[name]) == digest(entry)
    assert found["state"]._metadata == content["state"]._metadata
    assert many.untyped_storage().nbytes() == 400_000
