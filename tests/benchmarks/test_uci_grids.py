"""The named grids: what is in them, and what is left out."""

import numpy
import pytest
from table_files import register, write_table

from benchmarks.data import names
from benchmarks.data.files import data_files
from benchmarks.uci.grid import STUDIES, left_out_sizes, make_grid, named_products
from gpclml.errors import ArgumentError

PAPER = ("boston", "concrete", "energy", "power", "wine-red", "wine-white")


@pytest.fixture(scope="module", autouse=True)
def _tables_of_the_registered_sizes(tmp_path_factory):
    """A grid asks of a data set only how many rows it has: these have one column of zeros."""
    folder = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPCLML_DATA", str(folder))
        sizes = {name: data_files()[name][0].num_data for name in {*names()} - {"diabetes"}}
        register(
            patch, [write_table(folder, name, numpy.zeros((n, 2))) for name, n in sizes.items()]
        )
        yield


def cells_of(name, **changes):
    return make_grid(named_products(name, **changes), leave_out=True)


@pytest.mark.slow
def test_the_grid_of_the_paper():
    products = named_products("paper")
    cells = make_grid(products, leave_out=True)
    left_out = left_out_sizes(products, cells)
    assert left_out == {"boston": [500, 600, 700], "energy": [700]}  # 455 and 691 rows
    assert len(cells) == (6 * 7 - 4) * 6 * 10
    assert {cell["dataset"] for cell in cells} == set(PAPER)
    assert {(cell["objective"], cell["held_out"]) for cell in cells} == {
        ("lml", None), *(("clml", share) for share in (0.9, 0.75, 0.5, 0.25, 0.1)),
    }  # fmt: skip
    assert {(cell["kernel"], cell["steps"], cell["lr"]) for cell in cells} == {
        ("deep-bottleneck", 100, 0.01)
    }


@pytest.mark.parametrize("name", sorted(set(STUDIES) - {"paper", "ablation"}))
def test_grids_of_other_kernels_have_the_plain_gp(name):
    plain = {
        (cell["dataset"], cell["n"], cell["seed"])
        for cell in cells_of(name)
        if (cell["kernel"], cell["objective"], cell["mean"]) == ("rbf", "lml", "constant")
    }
    assert plain == {(cell["dataset"], cell["n"], cell["seed"]) for cell in cells_of(name)}


def test_settings_beside_a_name_replace_those_of_the_grid():
    cells = cells_of("paper", datasets=("energy",), sizes=(100,), seeds=2)
    assert len(cells) == 6 * 2
    assert {cell["dtype"] for cell in cells} == {"float32"}  # as the authors' code
    assert {cell["dtype"] for cell in cells_of("paper", dtype="float64")} == {"float64"}
    with pytest.raises(ArgumentError, match="n: got 500 for boston, expected 2 to 455"):
        make_grid(named_products("paper"))
