"""Networks of dictionaries, as those of Hugging Face, as functions of one tensor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature.structure import in_single
from gpclml.errors import ArgumentError, ShapeError

Inputs = Tensor | Mapping[str, Tensor]
"""Points, ``(N, *event)``, or a dictionary of tensors with a row for each point."""

NetworkData = (
    Mapping[str, Tensor] | tuple[Inputs, Tensor] | Iterable[Sequence[Inputs] | Mapping[str, Tensor]]
)
"""Points and targets; an iterable of such pairs, or of dictionaries with targets."""

NetworkPoints = Inputs | Iterable[Inputs | Sequence[Inputs]]
"""Points, or an iterable of points or of sequences that begin with them."""

_TARGETS = ("labels", "label", "targets", "target")  # of a dictionary, the first one it has


class TensorNetwork(torch.nn.Module):
    """A network as a function of one tensor, with the same parameters by the same names.

    Dictionaries are packed into tensors ``(N, size)`` of double precision, which hold integers,
    truth values and single precision exactly, so that points can be counted, split and
    differentiated whatever they are made of.

    Args:
        network: Takes tensors, dictionaries, or the entries of a dictionary as its arguments.
        output: Takes what the network returns and gives its outputs, ``(N, C)``; None for the
            tensor itself, or ``logits`` of what the networks of Hugging Face return.
    """

    def __init__(self, network: torch.nn.Module, output: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        # The very dictionaries of the network, not a child: names have no prefix, and what is put
        # in the place of a parameter for one call is so for both.
        shared = {k: vars(network)[k] for k in ("_parameters", "_buffers", "_modules")}
        vars(self).update(shared, _network=network)
        self._output = output
        self._layouts: dict[int, list[tuple[str, torch.Size, torch.dtype]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Outputs at points, or packed dictionaries."""
        network: Any = self._network
        result: Any
        layout = self._layouts.get(x.shape[-1]) if x.ndim == 2 else None
        if layout is None:
            result = network(x)
        else:
            sizes = [max(1, math.prod(shape)) for _, shape, _ in layout]
            columns = zip(layout, x[:, : sum(sizes)].split(sizes, dim=1), strict=True)
            inputs = {k: p.reshape(-1, *shape).to(dtype) for (k, shape, dtype), p in columns}
            # Networks of Hugging Face take the entries as arguments, others the dictionary.
            try:
                inspect.signature(network.forward).bind(**inputs)
            except TypeError:
                result = network(inputs)
            else:
                result = network(**inputs)
        if self._output is not None:
            return self._output(result)
        if isinstance(result, Mapping) and "logits" in result:
            return cast(Tensor, result["logits"])
        return cast(Tensor, getattr(result, "logits", result))

    @property
    def is_needed(self) -> bool:
        """Whether points were dictionaries, or outputs are made of what the network returns."""
        return bool(self._layouts) or self._output is not None

    def tensor_of(self, argument: str, x: Any) -> Any:
        """A dictionary of tensors as one tensor; anything else as it is."""
        if not isinstance(x, Mapping):
            return x
        wrong = [k for k, v in x.items() if not isinstance(v, Tensor) or v.ndim == 0]
        if wrong or not x:
            got = f"a dictionary with {wrong[0]!r}, no tensor of points" if wrong else "no entry"
            raise ArgumentError(argument, got, "tensors with a row for each point")
        counts = {k: len(v) for k, v in x.items()}
        if len(set(counts.values())) > 1:
            raise ShapeError(argument, f"rows {counts}", "as many rows in all entries")
        layout = [(k, v.shape[1:], v.dtype) for k, v in x.items()]
        columns = [v.reshape(len(v), -1).double() for v in x.values()]
        width = sum(column.shape[1] for column in columns)
        # Sequences of other lengths have other widths; two layouts of one width get a column more.
        while self._layouts.setdefault(width, layout) != layout:
            columns.append(columns[0].new_zeros(len(columns[0]), 1))
            width += 1
        return torch.cat(columns, dim=1)

    def pairs(self, argument: str, data: Any, size: int) -> Any:
        """Data whose points are tensors: pairs, or dictionaries that have their targets."""
        if isinstance(data, tuple):
            return (*(self.tensor_of(argument, x) for x in data[:1]), *data[1:])
        if isinstance(data, Mapping):
            starts = range(0, len(self.tensor_of(argument, data)), size)  # and its checks
            data = [{k: v[first : first + size] for k, v in data.items()} for first in starts]
        return self._pairs(argument, data)

    def _pairs(self, argument: str, data: Any) -> Iterator[Any]:
        for element in data:
            if isinstance(element, Mapping):
                name = next((name for name in _TARGETS if name in element), None)
                if name is None:
                    got = f"a dictionary of {', '.join(element)}"
                    raise ArgumentError(argument, got, "one with labels, or pairs with targets")
                inputs = {k: v for k, v in element.items() if k != name}
                yield self.tensor_of(argument, inputs), element[name]
            elif isinstance(element, list | tuple) and element:
                yield self.tensor_of(argument, element[0]), *element[1:]
            else:
                yield element

    def points(self, argument: str, x: Any) -> Any:
        """Points, or an iterable of them, as tensors; targets of dictionaries are left out."""
        if isinstance(x, Tensor):
            return x
        if isinstance(x, Mapping):
            return self._inputs(argument, x)
        return (
            self._inputs(argument, element[0] if isinstance(element, list | tuple) else element)
            for element in x
        )

    def _inputs(self, argument: str, x: Any) -> Any:
        if isinstance(x, Mapping):
            x = {name: value for name, value in x.items() if name not in _TARGETS}
        return self.tensor_of(argument, x)


@torch.no_grad()
@checked(late=True, passes_on="x", x="(N, *event)")
def network_outputs(network: torch.nn.Module, x: Tensor) -> Tensor:
    """The network's outputs, ``(N, C)``; a typed error where it does not take the points."""
    weight = next((p for p in network.parameters() if p.is_floating_point()), x)
    if weight.device != x.device:
        raise ArgumentError("x", f"points on {x.device}", f"{weight.device}, as the network")
    outputs = cast(Any, network(x))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(x):
        got = f"outputs {tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)}"
        suggestion = "Give output=, which makes them of what the network returns."
        raise ShapeError("network", got, f"outputs ({len(x)}, C), a row for each point", suggestion)
    return in_single(outputs)
