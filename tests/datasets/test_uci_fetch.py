"""Downloads from a server on the loopback interface, whole, corrupt, cut off and missing."""

from __future__ import annotations

import hashlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pooch  # here, so that its log stream is not one that a test captures and closes
import pytest
from table_files import register

from gpclml import datasets
from gpclml.datasets.sources import UciSource
from gpclml.errors import DataError, UnknownNameError

YACHT = datasets.uci_source("yacht")


@contextmanager
def serving(reply) -> Iterator[str]:
    """The address of a file whose GET is answered by ``reply(handler)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            reply(self)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/yacht.txt"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sending(body: bytes, claimed: int | None = None, status: int = 200):
    def reply(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def files_in(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def _direct_and_quiet(monkeypatch):
    """Loopback is reached without a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def small(monkeypatch) -> tuple[UciSource, bytes]:
    """The registry's yacht entry standing for a small table made here, and that table."""
    body = b"".join(b"%d 0.5 1 2 3 4 %d.25\n" % (k, k) for k in range(308))
    source = replace(YACHT, sha256=sha256(body), bytes=len(body))
    register(monkeypatch, [source])
    return source, body


def test_whole_file_is_fetched_once_and_then_read(tmp_path, small, capsys):
    source, body = small
    with serving(sending(body)) as address:
        path = datasets.fetch("yacht", folder=tmp_path, address=address, progress=True)
    assert path == tmp_path / "uci" / "yacht.txt"
    assert path.read_bytes() == body
    assert "yacht.txt: 100%" in capsys.readouterr().err
    # The server is gone: what follows can only come from the cache.
    assert datasets.fetch("yacht", folder=tmp_path, address=address) == path
    data = datasets.load("yacht", folder=tmp_path)
    assert data.inputs[:, 0].tolist() == list(range(308))
    assert data.targets.tolist() == [k + 0.25 for k in range(308)]
    assert data.note == source.note
    assert files_in(tmp_path) == ["uci/yacht.txt"]


def test_no_bar_without_progress(tmp_path, small, capsys):
    _, body = small
    with serving(sending(body)) as address:
        datasets.fetch("yacht", folder=tmp_path, address=address, progress=False)
    assert "%" not in capsys.readouterr().err


@pytest.mark.parametrize("progress", [True, False])
def test_corrupt_download_names_both_checksums_and_keeps_nothing(tmp_path, progress):
    body = b"1 2 3 4 5 6 7\n" * 500
    with (
        serving(sending(body)) as address,
        pytest.raises(DataError, match="does not match") as caught,
    ):
        datasets.fetch("yacht", folder=tmp_path, address=address, progress=progress)
    message = str(caught.value)
    for part in ("yacht.txt", YACHT.sha256, sha256(body), address, "call again"):
        assert part in message
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("progress", [True, False])
def test_truncated_download_names_both_checksums_and_keeps_nothing(tmp_path, small, progress):
    source, body = small
    part = body[:3000]
    with (
        serving(sending(part, claimed=len(body))) as address,
        pytest.raises(DataError, match="failed") as caught,
    ):
        datasets.fetch("yacht", folder=tmp_path, address=address, progress=progress)
    message = str(caught.value)
    for expected in ("yacht.txt", source.sha256, f"({len(body)} bytes)", address, "call again"):
        assert expected in message
    assert files_in(tmp_path) == []


def test_body_shorter_than_the_file_but_not_than_claimed(tmp_path, small):
    source, body = small
    with serving(sending(body[:-1])) as address, pytest.raises(DataError) as caught:
        datasets.fetch("yacht", folder=tmp_path, address=address)
    assert sha256(body[:-1]) in str(caught.value)
    assert source.sha256 in str(caught.value)
    assert files_in(tmp_path) == []


def test_missing_on_the_server(tmp_path):
    with (
        serving(sending(b"gone", status=404)) as address,
        pytest.raises(DataError, match="404") as caught,
    ):
        datasets.fetch("yacht", folder=tmp_path, address=address)
    message = str(caught.value)
    for part in ("yacht.txt", YACHT.sha256, address, "call again"):
        assert part in message
    assert files_in(tmp_path) == []


def test_no_network(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/yacht.txt"
        with pytest.raises(DataError, match="refused") as caught:
            datasets.fetch("yacht", folder=tmp_path, address=address)
    message = str(caught.value)
    for part in ("yacht.txt", YACHT.sha256, "Check the network"):
        assert part in message
    assert files_in(tmp_path) == []


def test_address_that_is_none_of_http(tmp_path):
    with pytest.raises(DataError, match=r"yacht\.txt"):
        datasets.fetch("yacht", folder=tmp_path, address="not an address")
    assert files_in(tmp_path) == []


def sending_for_ever(sent, claimed):
    """A reply without end, which counts what it could send."""

    def reply(handler):
        handler.send_response(200)
        if claimed:
            handler.send_header("Content-Length", str(claimed))
        handler.end_headers()
        with suppress(ConnectionError):
            while True:
                handler.wfile.write(bytes(1 << 16))
                sent.append(1 << 16)

    return reply


@pytest.mark.parametrize("claimed", [None, "as registered", 1 << 40])
@pytest.mark.parametrize("progress", [True, False])
def test_a_download_ends_at_the_registered_size(tmp_path, small, progress, claimed):
    source, _ = small
    sent: list[int] = []
    # A reader trusts a claimed length itself: what is beyond it is left unread.
    reply = sending_for_ever(sent, source.bytes if claimed == "as registered" else claimed)
    with serving(reply) as address, pytest.raises(DataError, match=r"yacht\.txt") as caught:
        datasets.fetch("yacht", folder=tmp_path, address=address, progress=progress)
    message = str(caught.value)
    wrong = "does not match" if claimed == "as registered" else "more than the registered"
    assert wrong in message
    assert "Nothing was kept" in message
    assert sum(sent) < 1 << 26  # what the buffers of the system hold, at most
    assert files_in(tmp_path) == []


def calls_of_the_main_thread() -> list[str]:
    frame, names = sys._current_frames()[threading.main_thread().ident], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.usefixtures("interruptible")
def test_interrupted_download_keeps_nothing(tmp_path, small):
    _, body = small
    caught = threading.Event()

    def interrupt_midway(handler):
        sending(body[:2000], claimed=len(body))(handler)
        handler.wfile.flush()
        # Not earlier: between opening its file and entering ``with`` nothing could close it.
        end = time.monotonic() + 5
        # The function that reads the body.
        while "stream" not in calls_of_the_main_thread() and time.monotonic() < end:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        with suppress(OSError):  # a signal that came just before a system call does not end it
            handler.wfile.write(body[2000:2001])
            handler.wfile.flush()
        caught.wait()

    with serving(interrupt_midway) as address:
        try:
            with pytest.raises(KeyboardInterrupt):
                datasets.fetch("yacht", folder=tmp_path, address=address)
        finally:
            caught.set()
    assert files_in(tmp_path) == []


def test_corrupt_file_in_the_cache_is_reported_and_removed_then_fetched(tmp_path, small):
    source, body = small
    path = tmp_path / "uci" / "yacht.txt"
    path.parent.mkdir()
    path.write_bytes(body[:100])
    with serving(sending(body)) as address:
        with pytest.raises(DataError, match="has been removed: call again") as caught:
            datasets.fetch("yacht", folder=tmp_path, address=address)
        for part in (str(path), source.sha256, sha256(body[:100]), "100 bytes", address):
            assert part in str(caught.value)
        assert files_in(tmp_path) == []
        datasets.fetch("yacht", folder=tmp_path, address=address)
    assert path.read_bytes() == body


def test_environment_names_the_folder(tmp_path, small, monkeypatch):
    _, body = small
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    with serving(sending(body)) as address:
        path = datasets.fetch("yacht", address=address)
    assert path == tmp_path / "uci" / "yacht.txt"


def test_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "uci").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="can be written to") as caught:
        datasets.fetch("yacht", folder=tmp_path)
    for part in ("yacht.txt", YACHT.sha256, "GPCLML_DATA"):
        assert part in str(caught.value)


def test_directory_in_the_file_s_place(tmp_path):
    (tmp_path / "uci" / "yacht.txt").mkdir(parents=True)
    with pytest.raises(DataError, match=r"yacht\.txt: the file cannot be read"):
        datasets.fetch("yacht", folder=tmp_path)


def test_fetch_leaves_pooch_s_logger_as_it_was(tmp_path, small):
    level = pooch.get_logger().level
    _, body = small
    with serving(sending(body)) as address:
        datasets.fetch("yacht", folder=tmp_path, address=address)
    assert pooch.get_logger().level == level == logging.NOTSET


def test_unknown_name(tmp_path):
    with pytest.raises(UnknownNameError, match="boston"):
        datasets.fetch("bostn", folder=tmp_path)
