"""Original files: their registry, and downloads from a server on the loopback interface."""

from __future__ import annotations

import gc
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pooch  # noqa: F401  here, so that its log stream is not one that a test captures and closes
import pytest
from table_files import register
from typer.testing import CliRunner

from benchmarks.data import fetch, has_files, load
from benchmarks.data.files import data_files
from benchmarks.dkt import study as dkt
from benchmarks.evidence import study as evidence
from benchmarks.tables import study as tables
from benchmarks.uci import study as uci
from gpclml.errors import DataError

pytestmark = [
    pytest.mark.slow,
    # pooch leaves replies open that it could not read.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

BODY = b"".join(b"%d 0.5 1 2 3 4 %d.25\n" % (k, k) for k in range(308))


@contextmanager
def serving(body: bytes, claimed: int | None = None, status: int = 200) -> Iterator[str]:
    """The address of a file with that body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
            self.end_headers()
            self.wfile.write(body)

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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty data folder; loopback is reached without a proxy."""
    for name, value in {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    yield tmp_path
    gc.collect()


@pytest.fixture
def from_address(monkeypatch):
    """The registry's yacht entry stands for a small table at an address."""
    [file] = data_files()["yacht"]
    checksum = f"sha256:{hashlib.sha256(BODY).hexdigest()}"

    def set_address(address: str) -> None:
        register(monkeypatch, [replace(file, checksum=checksum, address=address)])

    return set_address


def files_in(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_once_and_then_read(folder, from_address):
    with serving(BODY) as address:
        from_address(address)
        assert not has_files("yacht")
        assert fetch("yacht") == [folder / "uci" / "yacht.txt"]
    # The server is gone: what follows can only come from the folder.
    data = load("yacht")
    assert data.inputs[:, 0].tolist() == list(range(308))
    assert data.targets.tolist() == [k + 0.25 for k in range(308)]
    assert has_files("yacht")
    assert files_in(folder) == ["uci/yacht.txt"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"body": b"1 2 3 4 5 6 7\n" * 500}, "does not match"),
        ({"body": BODY[:3000], "claimed": len(BODY)}, "failed"),
        ({"body": b"gone", "status": 404}, "404"),
    ],
    ids=["corrupt", "cut off", "missing"],
)
def test_a_download_that_fails_keeps_nothing(folder, from_address, reply, message):
    with serving(**reply) as address:
        from_address(address)
        with pytest.raises(DataError, match=message) as caught:
            fetch("yacht")
    for text in (str(folder / "uci" / "yacht.txt"), address, "Check the network", "GPCLML_DATA"):
        assert text in str(caught.value)
    assert files_in(folder) == []


def test_no_network(folder, from_address):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        from_address(f"http://127.0.0.1:{taken.getsockname()[1]}/yacht.txt")
        with pytest.raises(DataError, match="refused"):
            fetch("yacht")
    assert files_in(folder) == []


@pytest.mark.parametrize("name", ["yacht", "emnist", "cyrillic"])
def test_another_file_in_its_place_is_refused_and_stays(name):
    [file] = data_files()[name]
    file.path.parent.mkdir(exist_ok=True)
    file.path.write_bytes(b"something else")
    with pytest.raises(DataError, match=f"another version. Expected {file.checksum}, found"):
        fetch(name)
    assert file.path.read_bytes() == b"something else"


def test_a_file_without_an_address():
    with pytest.raises(DataError, match=r"cyrillic42\.npz: no such file.* put a copy there"):
        fetch("cyrillic")


@pytest.mark.parametrize(
    ("study", "options", "file", "stand_in"),
    [
        (uci.STUDY, "--datasets yacht", "uci/yacht.txt", "--datasets diabetes"),
        (tables.STUDY, "--tables yacht", "uci/yacht.txt", "--tables diabetes"),
        (dkt.STUDY, "--study cub", "cub/CUB_200_2011.tgz", "--study digits"),
        (dkt.STUDY, "--study qmul", "qmul/images", "--study digits"),
        (evidence.STUDY, "uci-networks", "uci/yacht.txt", "--data digits"),
        (evidence.STUDY, "architectures --data cifar10-part", "train8000.npz", "--data digits"),
    ],
)
def test_a_runner_without_its_files(folder, from_address, study, options, file, stand_in):
    from_address("")
    line = f"run {options} --quiet --results {folder / 'a.sqlite'}"
    answer = CliRunner().invoke(study.make_app(), line.split())
    assert answer.exit_code == 2
    [said] = answer.stderr.splitlines()
    assert file in said
    assert stand_in in said
    assert files_in(folder) == []


@pytest.mark.parametrize("name", data_files())
def test_entries_are_complete(name):
    for file in data_files()[name]:
        assert re.fullmatch(r"(sha256:[0-9a-f]{64}|md5:[0-9a-f]{32})?", file.checksum)
        assert file.checksum if file.address else True
        assert file.address.startswith("https://") or not file.address
        assert file.note
        assert file.licence
        if file.folder == "uci":
            assert re.search(r"/[0-9a-f]{40}/", file.address)  # pinned to a commit
            assert file.num_data > 20
            assert file.num_features > 2


def test_tables_have_files_of_their_own():
    tables = [file for files in data_files().values() for file in files if file.folder == "uci"]
    assert len({file.file for file in tables}) == len({file.checksum for file in tables}) == 25
