"""Checkpoints: no damage goes unseen, none that is of something else is gone on with."""

import contextlib
import errno
import io
import os
import random
import stat

import numpy as np
import pytest
import torch
from checkpoint_files import WRITERS, data, laplace, save_model, train_online, train_tasks, transfer

from gpclml._utils.files import read_checkpoint, write_atomically, write_checkpoint
from gpclml._utils.resuming import digest
from gpclml.conditioning import LastPoints
from gpclml.curvature import Diagonal
from gpclml.errors import DataError, UnsupportedError
from gpclml.meta import PeriodicTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

FLIPS = 250  # of each of the three kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_files_are_refused_or_read_as_they_were(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    raw, expected = path.read_bytes(), digest(read_checkpoint(path, kind))
    assert digest(torch.load(path, weights_only=True)) == expected
    for bit in random.Random(kind).sample(range(8 * len(raw)), FLIPS):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        with contextlib.suppress(DataError):
            assert digest(read_checkpoint(path, kind)) == expected
    for cut in [0, 1, 30, len(raw) // 2, len(raw) - 1]:
        path.write_bytes(raw[:cut])
        with pytest.raises(DataError):
            read_checkpoint(path, kind)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.pt", {"format": "another"}, "is not a a kind checkpoint"),
        ("a.pt", {"version": 1}, "has checkpoint version 1, this release reads 2"),
        ("b.pt", {}, "there is no file"),
    ],
)
def test_other_files_are_told(tmp_path, name, content, match):
    write_checkpoint(tmp_path / "a.pt", "a kind", content)
    with pytest.raises(DataError, match=match):
        read_checkpoint(tmp_path / name, "a kind")


RESUMED = {
    "gpclml.GPRegression": GPRegression.load,
    "gpclml.OnlineFit": train_online,
    "gpclml.DeepKernelTransfer": train_tasks,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESUMED)
def test_entries_that_miss_or_are_of_another_type_are_told(tmp_path, kind):
    path = tmp_path / "a.pt"
    WRITERS[kind](path)
    content = torch.load(path, weights_only=True)
    del content["format"], content["version"]
    entries = [(content, name) for name in content]
    entries += [(inner, name) for inner in content.values() if isinstance(inner, dict)
                for name in inner]  # fmt: skip
    for inner, name in entries:
        if name.endswith("_bound"):  # of constraints, for which GPyTorch takes its defaults
            continue
        kept = inner.pop(name)
        write_checkpoint(path, kind, content)
        inner[name] = kept
        with pytest.raises(DataError, match=r"a\.pt"):
            RESUMED[kind](path)
    for name in content:
        write_checkpoint(path, kind, content | {name: 7})
        with pytest.raises(DataError, match=f"a int for '{name}'"):
            RESUMED[kind](path)


@pytest.mark.slow
def test_an_online_training_with_something_else_does_not_go_on(tmp_path):
    path = tmp_path / "a.pt"
    train_online(path)
    raw = path.read_bytes()
    others = dict(seed=1, lr=0.5, final_lr=1e-4, hyper_lr=0.2, hyper_steps=3, batch_size=20)
    others = {name: {name: value} for name, value in others.items()}
    others |= {"burn_in": {"burn_in": 2}, "every": {"every": 2}}
    others["train_x"], others["train_y"] = {"x": data()[0] + 1e-9}, {"y": data()[1].roll(1)}
    others["objective"] = {"mll": laplace(curvature=Diagonal())}
    for name, options in others.items():
        with pytest.raises(DataError, match=f"differs in {name}( |, |\\.)") as caught:
            train_online(path, **{"epochs": 5} | options)
        assert ("0 there, 1 here" in str(caught.value)) == (name == "seed")
        assert "the release that wrote it if names of classes changed" in str(caught.value)
    with pytest.raises(DataError, match=r"differs in train_y, lr .*, seed "):
        train_online(path, y=data()[1] + 1, lr=0.5, seed=3)
    assert path.read_bytes() == raw
    train_online(path, epochs=5)
    path.unlink()
    train_online(path, final_lr=1e-4)  # where the rate falls, the number of epochs counts
    with pytest.raises(DataError, match=r"differs in epochs \(3 there, 5 here\)"):
        train_online(path, final_lr=1e-4, epochs=5)


def test_a_training_on_other_tasks_does_not_go_on(tmp_path):
    path, mll = tmp_path / "a.pt", transfer()
    train_tasks(path)
    others = dict(validation=None, lr=0.5, tasks_per_step=2, validation_tasks=3, look_every=1)
    others = {name: {name: value} for name, value in others.items()}
    others["tasks"] = {"tasks": PeriodicTasks(5, 6, seed=3)}
    another = ConditionalMarginalLogLikelihood(mll.likelihood, mll.model, LastPoints(m=2))
    others["objective"] = {"mll": another}
    for name, options in others.items():
        with pytest.raises(DataError, match=f"differs in {name}( |, |\\.)"):
            train_tasks(path, **{"steps": 5} | options)
    train_tasks(path, steps=5)


class _Full(io.FileIO):
    """A file on a disk that is full after so many bytes."""

    room = 0

    def write(self, data):
        _Full.room -= len(data)
        if _Full.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_full_disks_are_said_so_and_leave_what_was_there(tmp_path, monkeypatch, share):
    path = tmp_path / "a.pt"
    save_model(path)
    raw = path.read_bytes()
    _Full.room = int(share * len(raw))
    monkeypatch.setattr("gpclml._utils.files.open", lambda p, _: _Full(p, "x"), raising=False)
    with pytest.raises(DataError, match=r"cannot write .*a\.pt .*No space left.* disk"):
        save_model(path)
    assert path.read_bytes() == raw
    assert list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    path = tmp_path / "a.pt"
    for entry in [object(), torch.eye(2).to_sparse(), random.Random, {1, 2}]:
        with pytest.raises(UnsupportedError, match=r"content\['a'\]\[0\]"):
            write_checkpoint(path, "a kind", {"a": [entry]})
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_as_it_was(tmp_path):
    path = tmp_path / "a.pt"
    many, shared = torch.arange(100_000.0), torch.arange(50_000.0)
    content = {
        "slice": many[3:5],
        "repeated": torch.ones(1).expand(300, 300),
        "turned": many[:6].view(2, 3).T,
        "first": shared,
        "second": shared,
        "state": torch.nn.BatchNorm1d(3).state_dict(),
    }
    numbers = [np.int64(3), np.float32(0.5), np.bool_(True), np.str_("b"), np.float64(0.1)]
    write_checkpoint(path, "a kind", {**content, "numbers": numbers})
    result = read_checkpoint(path, "a kind")
    # Shared memory is stored once, and views without what they do not show.
    assert 200_000 + 360_000 < path.stat().st_size < 200_000 + 360_000 + 20_000
    for name, entry in content.items():
        assert digest(result[name]) == digest(entry)
    assert result["state"]._metadata == content["state"]._metadata
    assert many.untyped_storage().nbytes() == 400_000
    assert result["numbers"] == [3, 0.5, True, "b", 0.1]
    assert [type(number) for number in result["numbers"]] == [int, float, bool, str, float]


# ------------------------------------------------------------------ files


@pytest.fixture
def umask():
    """Sets the umask of this process; it is as before afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_modes_are_those_of_the_umask_or_of_the_file_that_is_replaced(tmp_path, umask):
    path = tmp_path / "file"
    for mask, expected in [(0o022, 0o644), (0o077, 0o600)]:
        umask(mask)
        write_atomically(path, lambda file: file.write(b"new"))
        assert (path.read_bytes(), mode(path)) == (b"new", expected)
        path.unlink()
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, lambda file: file.write(b"new"))
    assert (path.read_bytes(), mode(path)) == (b"new", 0o640)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
@pytest.mark.parametrize("where", ["write", "rename"])
def test_where_writing_fails_all_is_as_before(tmp_path, monkeypatch, error, where):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_):
        raise error

    if where == "rename":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_atomically(path, fail if where == "write" else lambda file: file.write(b"half"))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_others_files_and_long_names(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    other, link, long = tmp_path / "file.part", tmp_path / "file", tmp_path / ("ä" * 127)
    other.write_bytes(b"mine")
    link.symlink_to(other)
    for path in (link, long):
        write_atomically(path, lambda file: file.write(b"new"))
        assert path.read_bytes() == b"new"
    assert other.read_bytes() == b"mine"
    assert not link.is_symlink()
    assert done == ["sync", "rename"] * 2  # the content is on the disk before it has the name


@pytest.mark.parametrize(
    ("kernel", "mean", "entry"),
    [
        ("deep", "constant", {"hidden": [1 << 16, 1 << 16]}),
        ("deep_bottleneck", "constant", {"num_features": 1 << 32}),
        ("rbf", "mlp", {"hidden": [1 << 16, 1 << 16]}),
        ("spectral_mixture", "constant", {"num_mixtures": 1 << 32}),
    ],
)
def test_a_model_that_asks_for_more_memory_than_its_state_is_refused(tmp_path, kernel, mean, entry):
    path = tmp_path / "a.pt"
    x = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
    GPRegression(x, x.sum(-1), kernel, mean).save(path)
    content = torch.load(path, weights_only=True)
    content["config"] |= entry
    write_checkpoint(path, content.pop("format"), content)
    with pytest.raises(DataError, match=r"parameters, of which it holds \d+"):
        GPRegression.load(path)
