"""Files are written whole or not at all, with the modes that the user asks for."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from gpclml._utils.files import write_atomically


@pytest.fixture
def umask():
    """Sets the umask of this process; it is as before afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_new_files_have_the_mode_of_the_umask(tmp_path, umask, mask, expected):
    umask(mask)
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"new"))
    assert (path.read_bytes(), mode(path)) == (b"new", expected)


def test_the_mode_of_a_file_that_is_replaced_stays(tmp_path, umask):
    umask(0o022)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, lambda file: file.write(b"new"))
    assert (path.read_bytes(), mode(path)) == (b"new", 0o640)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
def test_where_writing_fails_all_is_as_before(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_where_renaming_fails_all_is_as_before(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path):
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_bytes(b"mine")
    link.symlink_to(other)
    write_atomically(link, lambda file: file.write(b"new"))
    assert (other.read_bytes(), link.read_bytes()) == (b"mine", b"new")
    assert not link.is_symlink()


def test_files_of_others_with_like_names_stay(tmp_path):
    names = "file.part", "file.tmp", f"file.{'0' * 32}.part"
    for name in names:
        (tmp_path / name).write_text("mine")
    write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert {path.name for path in tmp_path.iterdir()} == {"file", *names}
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_names_as_long_as_they_may_be(tmp_path):
    path = tmp_path / ("ä" * 127)
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"


def test_the_content_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert done == ["sync", "rename"]
