"""A folder is exchanged with the one in its place in one step; others keep what they have there."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

import pytest

from gpclml.cli import exchange, folders
from gpclml.cli.exchange import exchange_folders
from gpclml.cli.folders import finish_interrupted, open_work_folder
from gpclml.cli.records import MODEL

NAMES = ("model.pt", "table.json")
OURS = (*NAMES, "model.json")
OTHERS = {"notes.txt": "mine", "pictures/a.png": "png", "pictures/old/b.png": "png"}


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def _can_exchange(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    try:
        exchange_folders(one, other)
    except OSError as error:
        pytest.skip(f"folders cannot be exchanged here: {error}")
    finally:
        one.rmdir()
        other.rmdir()


@pytest.fixture
def out(tmp_path):
    """A model with files of others beside it."""
    out = tmp_path / "m"
    write(out, "old")
    for name, text in OTHERS.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    (out / "empty").mkdir()
    return out


def write(out, text):
    """Writes a folder as the command does."""
    with open_work_folder(out, MODEL, NAMES) as work:
        for name in NAMES:
            work.add_text(name, text)
        work.publish({"text": text})


def check(out, text, others=OTHERS):
    """The folder is that of one run, with the files of others; nothing is left beside it."""
    files = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.*")}
    record = json.loads(files.pop("model.json"))
    assert record["text"] == text
    assert set(record) & {"work", "former"} == set()
    assert files == {**dict.fromkeys(NAMES, text), **others}
    assert [path.name for path in out.parent.iterdir()] == ["m"]


def before_exchange(monkeypatch, change):
    """Has something happen between the making of the links and the exchange."""

    def changed(first, second):
        change()
        exchange_folders(first, second)

    monkeypatch.setattr(folders, "exchange_folders", changed)


def no_exchange(first, second):
    """Stands for a system that cannot exchange folders."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def killed_after_exchange(monkeypatch, out):
    """Leaves the folder as a run does that is killed just after the exchange."""
    with monkeypatch.context() as patch:

        def killed(first, second):
            exchange_folders(first, second)
            raise Killed

        patch.setattr(folders, "exchange_folders", killed)
        with pytest.raises(Killed):
            write(out, "new")


def test_two_folders_are_exchanged(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    exchange_folders(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b.txt"]
    assert os.listdir(tmp_path / "b") == ["a.txt"]
    with pytest.raises(FileNotFoundError):
        exchange_folders(tmp_path / "a", tmp_path / "absent")


def test_a_system_without_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        exchange_folders(tmp_path, tmp_path)


def test_others_keep_their_files_with_modes_and_times(out):
    (out / "notes.txt").chmod(0o440)
    (out / "pictures").chmod(0o711)
    (out / "pictures" / "old").chmod(0o2750)
    out.chmod(0o770)
    (out / "link").symlink_to("absent")
    os.mkfifo(out / "pipe")
    (out / "of bytes \udcff").write_text("")
    os.link(out / "notes.txt", out / "the same")
    names = [*OTHERS, "link", "pipe", "of bytes \udcff", "pictures/old", "pictures", "empty"]
    for name in names:
        os.utime(out / name, (1_000_000, 2_000_000), follow_symlinks=False)
    before = {name: os.lstat(out / name) for name in names}
    own, folder = os.lstat(out / "model.pt"), os.lstat(out)
    with (out / "notes.txt").open("a") as file:  # whoever has a file open goes on writing it
        write(out, "new")
        file.write(", still")
    assert (out / "notes.txt").read_text() == "mine, still"
    assert (out / "model.pt").read_text() == "new"
    os.utime(out / "notes.txt", (1_000_000, 2_000_000))
    for name, status in before.items():
        now = os.lstat(out / name)
        assert (now.st_mode, now.st_mtime, now.st_uid, now.st_gid) == (
            status.st_mode, status.st_mtime, status.st_uid, status.st_gid
        )  # fmt: skip
        if not stat.S_ISDIR(now.st_mode):
            assert (now.st_ino, now.st_nlink) == (status.st_ino, status.st_nlink)
    assert stat.S_IMODE(out.stat().st_mode) == 0o770
    assert out.stat().st_ino != folder.st_ino  # it was exchanged
    assert os.lstat(out / "model.pt").st_ino != own.st_ino


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs the rights to give away")
def test_folders_keep_their_owners(out):
    try:
        os.chown(out, 12, 34)
        os.chown(out / "pictures", 56, 78)
    except OSError as error:  # a container, whose root has other users nowhere
        pytest.skip(f"other owners are unknown here: {error}")
    write(out, "new")
    check(out, "new")
    for path, owner in ((out, (12, 34)), (out / "pictures", (56, 78))):
        assert (path.stat().st_uid, path.stat().st_gid) == owner


@pytest.mark.parametrize(
    ("module", "name"), [(folders, "exchange_folders"), (exchange.os, "link"), (os, "chown")]
)
def test_where_it_is_impossible_files_are_replaced_one_by_one(out, monkeypatch, module, name):
    def fail(*args, **options):
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(module, name, fail)
    inode = out.stat().st_ino
    write(out, "new")
    check(out, "new")
    assert (out / "empty").is_dir()
    assert out.stat().st_ino == inode


@pytest.mark.parametrize("here", [".", "pictures/old"])
def test_the_current_folder_is_not_exchanged(out, monkeypatch, here):
    monkeypatch.chdir(out / here)
    inode = out.stat().st_ino
    write(out, "new")
    check(out, "new")
    assert os.getcwd() == str((out / here).resolve())
    assert out.stat().st_ino == inode


def test_folders_with_mounts_are_not_exchanged(out, monkeypatch):
    entries = exchange._entries

    def with_mount(folder, within=""):
        for name, status in entries(folder, within):
            fields = list(status)
            if name == "pictures":
                fields[stat.ST_DEV] += 1
            yield name, os.stat_result(fields)

    monkeypatch.setattr(exchange, "_entries", with_mount)
    inode = out.stat().st_ino
    write(out, "new")
    check(out, "new")
    assert out.stat().st_ino == inode


def test_a_file_that_comes_just_before_the_exchange(out, monkeypatch):
    def change():
        (out / "late.txt").write_text("late")
        (out / "pictures" / "late.png").write_text("late")
        (out / "later").mkdir()
        (out / "later" / "late.txt").write_text("late")
        (out / "new notes.txt").write_text("edited")
        (out / "new notes.txt").replace(out / "notes.txt")  # as editors save

    before_exchange(monkeypatch, change)
    write(out, "new")
    late = dict.fromkeys(("late.txt", "pictures/late.png", "later/late.txt"), "late")
    check(out, "new", OTHERS | late | {"notes.txt": "edited"})


def test_a_file_of_the_command_that_is_edited_just_before_the_exchange(out, monkeypatch):
    """It is not lost: it stays beside the folder, and the next run names it."""
    before_exchange(monkeypatch, lambda: (out / "model.pt").write_text("edited"))
    write(out, "new")
    part = out.with_name("m.part")
    assert (out / "model.pt").read_text() == "new"
    assert [(path.name, path.read_text()) for path in part.iterdir()] == [("model.pt", "edited")]
    with pytest.raises(folders.DataError, match=r"m\.part is there and was not written"):
        write(out, "newer")
    assert (part / "model.pt").read_text() == "edited"


def test_what_others_do_after_a_kill_counts(out, monkeypatch):
    """What they remove does not come back, and what they write stays."""
    killed_after_exchange(monkeypatch, out)
    assert (out / "model.pt").read_text() == "new"
    (out / "pictures" / "a.png").unlink()
    (out / "pictures" / "old" / "b.png").unlink()
    (out / "pictures" / "old").rmdir()
    (out / "new notes.txt").write_text("edited")
    (out / "new notes.txt").replace(out / "notes.txt")
    finish_interrupted(out)
    check(out, "new", {"notes.txt": "edited"})
    assert sorted(path.name for path in out.iterdir()) == [
        "empty", "model.json", "model.pt", "notes.txt", "pictures", "table.json"
    ]  # fmt: skip
    write(out, "newer")
    check(out, "newer", {"notes.txt": "edited"})


def test_a_folder_that_is_put_beside_it_after_a_kill_stays(out, monkeypatch, tmp_path):
    """What is left of the old folder is known by its inode number, not by its name."""
    killed_after_exchange(monkeypatch, out)
    part = out.with_name("m.part")
    part.rename(tmp_path / "moved")
    part.mkdir()
    for name in ("model.pt", "more.txt"):
        (part / name).write_text("mine")
    finish_interrupted(out)
    assert "work" not in json.loads((out / "model.json").read_text())
    assert {path.name: path.read_text() for path in part.iterdir()} == {
        "model.pt": "mine", "more.txt": "mine"
    }  # fmt: skip
    assert (tmp_path / "moved" / "model.pt").read_text() == "old"


def test_what_a_killed_run_left_in_the_new_folder(out, monkeypatch):
    """A temporary file there, and links to some of the files, do not hinder the exchange."""

    def killed(first, second):
        (first / f"model.json.{32 * '0'}.part").write_text("unfinished")
        (first / "notes.txt").unlink()
        (first / "pictures" / "old" / "b.png").unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange_folders", killed)
        with pytest.raises(Killed):
            write(out, "new")
    inode = out.stat().st_ino
    finish_interrupted(out)
    check(out, "new")
    assert out.stat().st_ino != inode


def test_a_new_file_with_the_inode_number_of_one_that_others_removed(out, monkeypatch):
    """The system gives numbers again; the file is not taken for a link to theirs."""

    def killed(first, second):
        record = json.loads((first / "model.json").read_text())
        former = record["former"]
        former["inodes"] = [*former["inodes"], (first / "model.pt").stat().st_ino]
        content = {key: record[key] for key in ("work", "text", "former")}
        text = folders.record_text(MODEL, content, record["files"])
        (first / "model.json").write_text(text)  # in place: it keeps its number
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange_folders", killed)
        with pytest.raises(Killed):
            write(out, "new")
    monkeypatch.setattr(folders, "exchange_folders", no_exchange)
    finish_interrupted(out)
    check(out, "new")


def test_inode_numbers_of_a_folder_that_was_copied_count_nothing(out, monkeypatch, tmp_path):
    def killed(first, second):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange_folders", killed)
        with pytest.raises(Killed):
            write(out, "new")
    part = out.with_name("m.part")
    others = [path for path in part.rglob("*") if path.is_file() and path.name not in OURS]
    for path in others:  # a copy has no links
        text = path.read_text()
        path.unlink()
        path.write_text(text)
    (part / "mine.txt").write_text("mine")
    record = json.loads((part / "model.json").read_text())
    record["former"]["inode"] += 1
    record["former"]["inodes"] = [(part / "mine.txt").stat().st_ino]
    content = {key: record[key] for key in ("work", "text", "former")}
    (part / "model.json").write_text(folders.record_text(MODEL, content, record["files"]))
    finish_interrupted(out)
    assert (out / "model.pt").read_text() == "new"
    assert (part / "mine.txt").read_text() == "mine"


def half_replaced(out, monkeypatch):
    """A run is killed when the first of two files that differ is replaced; the model is no more."""
    replace = os.replace

    def killed(source, target):
        replace(source, target)
        if target == out / "model.pt":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange_folders", no_exchange)
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            write(out, "new")


def test_only_files_whose_bytes_differ_are_replaced(out, monkeypatch):
    replaced, replace = [], os.replace

    def noted(source, target):
        replaced.append(target.name)
        replace(source, target)

    inode = (out / "table.json").stat().st_ino
    monkeypatch.setattr(folders, "exchange_folders", no_exchange)
    with open_work_folder(out, MODEL, NAMES) as work:
        work.add_text("model.pt", "new")
        work.add_text("table.json", "old")
        monkeypatch.setattr(folders.os, "replace", noted)
        work.publish({"text": "new"})
    assert [name for name in replaced if name in NAMES] == ["model.pt"]
    assert (out / "table.json").stat().st_ino == inode
    assert (out / "model.pt").read_text() == "new"
    assert [path.name for path in out.parent.iterdir()] == ["m"]


def test_files_of_two_runs_that_cannot_be_completed_are_refused(out, monkeypatch):
    half_replaced(out, monkeypatch)
    assert (out / "table.json").read_text() == "old"

    def fail(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "only_run", fail)
        with pytest.raises(folders.DataError, match="files of two runs, since one was killed"):
            finish_interrupted(out)
    finish_interrupted(out)
    check(out, "new")


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_whole_model_that_cannot_be_settled_may_be_read(out, monkeypatch, exchanged):
    """What a killed run left beside it does not matter to those who may only read."""

    def killed(first, second):
        if exchanged:
            exchange_folders(first, second)
        raise Killed

    def fail(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "exchange_folders", killed)
        with pytest.raises(Killed):
            write(out, "new")
        patch.setattr(folders, "only_run", fail)
        finish_interrupted(out)
    assert (out / "model.pt").read_text() == ("new" if exchanged else "old")


def test_ctrl_c_during_the_exchange(out, monkeypatch):
    calls = []

    def interrupted(first, second):
        calls.append(first)
        if len(calls) == 1:
            raise KeyboardInterrupt
        exchange_folders(first, second)

    monkeypatch.setattr(folders, "exchange_folders", interrupted)
    write(out, "new")
    assert len(calls) == 2
    check(out, "new")
