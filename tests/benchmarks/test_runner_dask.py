"""Sweeps on a real Dask cluster of two worker processes."""

import site
import socket
import threading

import grid_cells
import pandas
import pytest

from benchmarks.runner import grid, load_results, run_grid
from gpclml.errors import ArgumentError

distributed = pytest.importorskip("distributed", reason="needs distributed")


def local_cluster(workers, threads=1, processes=False):
    """Named by its address on loopback, or Dask would ask which network reaches the world."""
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=threads, processes=processes,
        host="127.0.0.1", protocol="tcp://", dashboard_address="127.0.0.1:0",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _patience():
    """Only what never answers fails here, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "CONNECT_SECONDS", 600.0)
        patch.setattr(grid, "WORKER_SECONDS", 600.0)
        yield


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2, processes=True) as cluster:
        yield cluster


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def run(cells, function, path, address, **options):
    address = getattr(address, "scheduler_address", address)
    return run_grid(cells, function, path, **{"progress": False, "address": address} | options)


@pytest.mark.slow
def test_workers_with_other_code_are_refused(path, tmp_path, cluster, monkeypatch):
    module, cells = tmp_path / "some_cells.py", [{"seed": 0}]
    text = "def cell(c):\n    return {'value': 1}\n"
    module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        client.run(site.addsitedir, str(tmp_path))
    import some_cells

    assert run(cells, some_cells.cell, path, cluster).computed == 1
    module.write_text(text.replace("1", "2"))  # as an edit after the workers' import
    with pytest.raises(ArgumentError, match="restart its workers"):
        run(cells, some_cells.cell, path, cluster)
    assert len(load_results(path)) == 1


@pytest.mark.slow
def test_a_killed_worker_leaves_the_undisturbed_table(path, tmp_path, cluster):
    cells = [{"seed": s, "folder": str(tmp_path), "lethal": "no"} for s in range(12)]
    cells[3]["lethal"] = "once"
    assert run(cells, grid_cells.lethal_cell, path, cluster).complete
    undisturbed = tmp_path / "undisturbed.sqlite"
    run_grid(cells, grid_cells.lethal_cell, undisturbed, progress=False)
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(undisturbed), check_exact=True
    )


@pytest.mark.slow
def test_a_lost_scheduler_ends_the_run_with_its_results_saved(path, tmp_path):
    log = tmp_path / "log"
    cells = [{"seed": seed, "log": str(log)} for seed in range(1000)]
    with local_cluster(1) as cluster:

        def close():
            grid_cells.wait_for(lambda: log.exists() and len(log.read_text().split()) >= 4)
            cluster.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(ArgumentError, match="What ended is saved"):
            run(cells, grid_cells.counted_cell, path, cluster)
        thread.join()
    assert 2 < len(load_results(path)) < 1000


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "silent", "pigeon://a:1"])
def test_unreachable_schedulers_are_refused(path, monkeypatch, address):
    monkeypatch.setattr(grid, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if address == "silent":
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ArgumentError, match=r"address.*dask scheduler"):
            run([{"seed": 1}], grid_cells.cholesky_cell, path, address)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "threads", "match"), [(0, 1, "none within"), (1, 2, "2 threads")]
)
def test_clusters_without_single_threaded_workers_are_refused(
    path, monkeypatch, workers, threads, match
):
    if workers == 0:
        monkeypatch.setattr(grid, "WORKER_SECONDS", 0.1)
    with local_cluster(workers, threads) as cluster, pytest.raises(ArgumentError, match=match):
        run([{"seed": 1}], grid_cells.cholesky_cell, path, cluster)
    assert not path.exists()
