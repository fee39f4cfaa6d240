"""The one check of arguments: types by the annotations, shapes by their notation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from gpclml._utils.arguments import (
    all_finite,
    check_counts,
    check_finite,
    check_positive,
    checked,
    seeded,
)
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError


class Drawable(Protocol):
    def draw(self) -> int: ...


@checked(x="float (*batch, n, d)", y="float (*batch, n)", labels="integer (n,)", order="index (n,)")
def takes_tensors(
    x: Tensor, y: Tensor | None = None, labels: Tensor | None = None, order: Tensor | None = None
) -> str:
    return "taken"


@checked
def takes_values(
    count: int = 1,
    rate: float = 0.5,
    flag: bool = True,
    name: str = "",
    kind: Literal["a", "b"] = "a",
    sizes: Sequence[int] = (),
    names: Iterable[str] = (),
    table: Mapping[str, Tensor] | None = None,
    function: Callable | None = None,
    module: torch.nn.Module | None = None,
    tasks: Drawable | None = None,
    pair: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    *counts: int,
    either: Literal["a", "b"] | torch.nn.Module | None = None,
    anything=None,
) -> str:
    return "taken"


def ones(*shape, **options):
    return torch.ones(shape, **options)


@pytest.mark.parametrize(("x", "y"), [((3, 2), (3,)), ((3, 2), (4, 3)), ((4, 1, 3, 2), (5, 3))])
def test_shapes_that_fit_are_taken(x, y):
    assert takes_tensors(ones(*x), ones(*y)) == "taken"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": ones(3)}, ShapeError, r"x: got \(3,\), expected \(\*batch, n, d\)"),
        ({"x": ones(0, 2)}, ShapeError, "x: got .*nothing of size zero"),
        (
            {"x": ones(3, 2), "y": ones(4)},
            ShapeError,
            r"y: got \(4,\), expected \(\*batch, n\) with n = 3 as x has it",
        ),
        (
            {"x": ones(4, 3, 2), "y": ones(5, 3)},
            ShapeError,
            r"y: got \(5, 3\).*\*batch = \(4,\) as x has it",
        ),
        ({"x": ones(3, 2).long()}, ArgumentError, "x: got a tensor of torch.int64, .* float32"),
        ({"x": ones(3, 2) + 0j}, ArgumentError, "x: got a tensor of torch.complex64"),
        ({"x": [[1.0]]}, TypeError, r"x: got list, expected a tensor. Use torch.as_tensor"),
        ({"x": ones(3, 2, device="meta")}, TypeError, 'x: got a tensor on the device "meta"'),
        ({"x": ones(3, 2), "labels": ones(3)}, ArgumentError, "labels: got .*float32"),
        ({"x": ones(3, 2), "labels": ones(3) > 0}, ArgumentError, "labels: got .*bool"),
        ({"x": ones(3, 2), "y": "y"}, TypeError, "y: got str, expected a tensor or None"),
    ],
)
def test_tensors_that_do_not_fit_are_told(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        takes_tensors(**arguments)
    assert isinstance(caught.value, ArgumentError)


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": np.int64(3)}, {"count": torch.tensor(3)}, {"count": True}, {"rate": 1},
        {"rate": np.float32(1)}, {"rate": torch.tensor(0.5)}, {"rate": float("inf")}, {"flag": 1},
        {"flag": np.bool_(True)}, {"kind": "b"}, {"either": "b"}, {"sizes": [1, 2]},
        {"sizes": range(3)},
        {"sizes": torch.arange(3)}, {"sizes": np.arange(3)}, {"names": {"a": 1}}, {"names": "abc"},
        {"names": (name for name in "ab")}, {"table": {"a": ones(1)}}, {"function": print},
        {"module": torch.nn.ReLU()}, {"pair": [0, 1]}, {"seed": 2**64 - 1}, {"anything": object()},
        {"settings": {"a": object()}},
    ],
)  # fmt: skip
def test_values_that_fit_are_taken(arguments):
    assert takes_values(**arguments) == "taken"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 2.5}, "count: got 2.5, expected an integer"),
        ({"count": 2**63}, "count: got 9223372036854775808, expected an integer from"),
        ({"rate": "a"}, "rate: got str, expected a number"),
        ({"rate": ones(2)}, "rate: got Tensor, expected a number"),
        ({"flag": 2}, "flag: got 2, expected True or False"),
        ({"name": b"x"}, "name: got bytes, expected text"),
        ({"kind": 3}, "kind: got 3, expected 'a' or 'b'"),
        ({"kind": "c"}, "kind: got 'c', expected one of a, b"),
        ({"either": "c"}, "either: got 'c', expected one of a, b"),
        ({"sizes": "ab"}, "sizes: got str, expected a sequence of integers"),
        ({"sizes": [1, None]}, r"sizes\[1\]: got NoneType"),
        ({"sizes": [2**70]}, "sizes: got 1180591620717411303424, expected integers from"),
        ({"names": [1]}, r"names\[0\]: got 1"),
        ({"table": [ones(1)]}, "table: got list, expected a mapping of texts to tensors"),
        ({"table": {"a": 1}}, r"table\['a'\]: got 1, expected a tensor"),
        ({"function": 3}, "function: got 3, expected a function or None"),
        ({"module": torch.nn.ReLU}, "module: got the class ReLU, expected a module or None"),
        ({"tasks": object()}, "tasks: got object, expected Drawable or None"),
        ({"pair": (1.0,)}, "pair: got tuple"),
        ({"seed": 2**64}, "seed: got 18446744073709551616"),
    ],
)
def test_values_that_do_not_fit_are_told(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        takes_values(**arguments)


def test_numbers_are_numbers_and_unknown_arguments_pythons_own_error():
    with pytest.raises(NonFiniteError, match="rate: got nan"):
        takes_values(rate=float("nan"))
    with pytest.raises(ArgumentError, match="counts: got str"):
        takes_values(
            *[1, 0.5, True, "", "a", (), (), None, None, None, None, (0, 1), 0, {}], 1, "x"
        )
    with pytest.raises(TypeError, match="unexpected keyword"):
        takes_values(other=1)  # pyright: ignore[reportCallIssue]


def test_a_late_check_looks_at_arguments_only_where_something_failed():
    looked = []

    class Watched(Tensor):
        @property
        def shape(self):
            looked.append(1)
            return super().shape

    @checked(late=True, values="float (n,)", other="float (n,)", order="index (b,)")
    def product(values: Tensor, other: Tensor, order: Tensor | None = None) -> Tensor:
        return values @ other if order is None else values[order]

    x = ones(3)
    assert product(x.as_subclass(Watched), x) == 3
    assert not looked
    for others, message in (
        ([ones(2)], r"other: got \(2,\), expected \(n,\) with n = 3"),
        ([x.double()], r"other: got torch.float64 .*, expected torch.float32"),
        ([x, torch.tensor([1, 5])], r"order: got indices from 1 to 5, expected indices .* 2"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            product(x, *others)
        assert isinstance(caught.value.__cause__, RuntimeError | IndexError)

    @checked(late=True)
    def fails(count: int) -> None:
        raise KeyError("the function's own")

    with pytest.raises(KeyError, match="own"):
        fails(3)


def test_a_module_of_the_callers_may_refuse_what_is_passed_on():
    @checked(passes_on="x", x="float (n, d)")
    def outputs(network: torch.nn.Module, x: Tensor) -> Tensor:
        return network(x)

    network = torch.nn.Linear(2, 1)
    assert outputs(network, ones(3, 2)).shape == (3, 1)
    with pytest.raises(ShapeError, match=r"x: got torch.float32 of shape \(3, 5\).*mat1 and mat2"):
        outputs(network, ones(3, 5))


def test_elements_of_lists_have_sizes_of_their_own():
    @checked(blocks="index (k, b)")
    def count(blocks: Sequence[Tensor]) -> int:
        return len(blocks)

    assert count([ones(2, 3).long(), ones(4, 1).long()]) == 2
    with pytest.raises(ShapeError, match=r"blocks\[1\]: got \(3,\)"):
        count([ones(2, 3).long(), ones(3).long()])


def test_classes_are_checked_where_they_are_made():
    @checked(x="(n,)")
    class Holder:
        def __init__(self, x: Tensor, k: int = 1) -> None:
            self.x = x

    assert isinstance(Holder(ones(2)), Holder)
    with pytest.raises(ShapeError, match="x: got"):
        Holder(ones(2, 2))
    with pytest.raises(ArgumentError, match="k: got str"):
        Holder(ones(2), k="1")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_found_and_counted(bad):
    values = torch.full((3, 4), 3e38, requires_grad=True)  # a sum that overflows is no fault
    check_finite("x", values)
    assert all_finite(values)
    assert all_finite(torch.empty(0))
    with torch.no_grad():
        values[1, 2], values[2, 0] = bad, -bad
    assert not all_finite(values)
    with pytest.raises(NonFiniteError, match=r"x: got 2 of 12 values not finite, .* Fix it\."):
        check_finite("x", values, "Fix it.")


def test_counts_are_integers_and_large_enough():
    check_counts(steps=1, size=None)
    check_counts(2, "Draw more.", draws=np.int64(2))
    for number in (0, -1, 1.5, math.nan, True, torch.tensor(1.5)):
        with pytest.raises(
            ArgumentError, match=r"steps: got .*, expected an integer of at least 1"
        ):
            check_counts(size=1, steps=number)
    with pytest.raises(ArgumentError, match=r"draws: got 1, .* at least 2. Draw more\."):
        check_counts(2, "Draw more.", draws=1)


def test_generators_have_seeds_of_python_or_numpy():
    draws = [torch.randn(3, generator=seeded(seed)) for seed in (5, np.int64(5))]
    assert torch.equal(*draws)
    generator = torch.Generator()
    assert seeded(generator) is generator
    with pytest.raises(TypeError):
        seeded(1.5)


@pytest.mark.parametrize("bad", [0, -1.5, math.nan, math.inf])
def test_positive_numbers(bad):
    check_positive(rate=1e-300, noise=torch.tensor([0.1, 1.0]), other=None)
    with pytest.raises(ArgumentError, match=rf"rate: got {bad}, .* positive .*\. Raise it\."):
        check_positive("Raise it.", rate=bad)
    with pytest.raises(ArgumentError, match=f"noise: got as low as {bad}"):
        check_positive(noise=torch.tensor([bad, math.inf]))
