"""Tests reach this machine alone: what the guard refuses, and what still works."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ELSEWHERE = "192.0.2.1"  # an address for documentation, that no machine has
pytest_plugins = ["pytester"]


def use(method, *arguments, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as connection:
        connection.settimeout(1)
        getattr(connection, method)(*arguments)


LEAVING = [
    lambda: use("connect", (ELSEWHERE, 80)),
    lambda: use("connect", ("2001:db8::1", 80), family=socket.AF_INET6),
    lambda: use("sendto", b"hello", (ELSEWHERE, 9), kind=socket.SOCK_DGRAM),
    lambda: use("bind", ("", 0)),
    lambda: use("bind", ("0.0.0.0", 0)),
    lambda: socket.create_connection(("example.org", 80), timeout=1),
    lambda: socket.gethostbyname("example.org"),
    lambda: socket.gethostbyaddr(ELSEWHERE),
    lambda: socket.getnameinfo((ELSEWHERE, 80), 0),
]


@pytest.mark.parametrize("leave", LEAVING)
def test_what_leaves_this_machine_is_refused(leave, refusals):
    errors = []

    def leave_from_a_thread():
        try:
            leave()
        except RuntimeError as error:
            errors.append(error)

    with pytest.raises(RuntimeError, match="tests reach this machine alone"):
        leave()
    thread = threading.Thread(target=leave_from_a_thread)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert len(refusals) == 2
    refusals.clear()


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            with socket.create_connection((host, port)) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"hello")
                assert client.recv(5) == b"hello"


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")
def test_unix_sockets_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # their names are short
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("a")
        server.listen()
        client.connect("a")


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (f"import socket; socket.create_connection(('{ELSEWHERE}', 80), 1)", True),
        ("import socket; socket.create_server(('127.0.0.1', 0)).close()", False),
    ],
)
def test_a_process_started_by_a_test_is_refused_too(code, refused):
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == int(refused), process.stderr
    assert ("NetworkRefusedError" in process.stderr) == refused


HIDDEN = """
import contextlib, socket

def test_hidden():
    with contextlib.suppress(Exception):
        socket.getaddrinfo("example.org", 80)
"""


@pytest.fixture
def suite(pytester):
    """A folder of tests with the fixtures of this one."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    return pytester


def test_a_test_that_hides_the_error_fails(suite, refusals):
    suite.makepyfile(HIDDEN)
    result = suite.inline_run("-p", "no:cacheprovider", "-p", "no:benchmark")
    assert [len(reports) for reports in result.listoutcomes()] == [1, 0, 1]
    assert "the test tried to leave this machine" in str(result.getfailures()[0].longrepr)
    refusals.clear()


def test_real_data_are_read_by_marked_tests_alone(suite):
    suite.makepyfile("def test_unmarked(data_folder): pass")
    result = suite.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:benchmark")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*test_unmarked reads real data: mark it `data`")
