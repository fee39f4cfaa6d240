"""Fully connected networks with a seeded start, stacks of networks, and checks of their outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import skip_init

from gpclml._utils.arguments import all_finite, check_counts, checked, seeded
from gpclml._utils.environment import seeded_globally
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError

__all__ = ["MLP", "StackedNetwork", "apply_network", "reset_network"]


class MLP(torch.nn.Sequential):
    """Fully connected network whose initial weights are drawn from a generator of its own.

    Weights and biases of a layer with ``k`` inputs start uniform on
    ``[-1/sqrt(k), 1/sqrt(k)]``, as in ``torch.nn.Linear``. They are drawn in float64 and
    then cast, so one seed gives one start in every dtype and on every device.

    Args:
        sizes: Width of the input, of each hidden layer and of the output, e.g. ``[d, 50, 50, 2]``.
        activation: Class of the modules between two layers, such as ``torch.nn.Tanh``.
        output_scale: Factor of the last layer's start. At zero the network is zero everywhere: a
            network mean learns from there, a deep kernel does not (see
            :class:`gpclml.kernels.DeepKernel`).
        generator: Generator of the initial weights; seed 0 if None.
        dtype: Dtype of the parameters; torch's default if None.
        device: Device of the parameters.

    Raises:
        ArgumentError: Fewer than two sizes, or a size that is not a positive integer.

    Examples:
        >>> import torch
        >>> from gpclml import MLP
        >>> network = MLP([3, 50, 50, 2], generator=torch.Generator().manual_seed(1))
        >>> network(torch.randn(10, 3)).shape
        torch.Size([10, 2])
    """

    @checked
    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
        output_scale: float = 1.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for size in sizes:
            check_counts(1, "The input width is the number of columns of x.", sizes=size)
        if len(sizes) < 2:
            suggestion = "Give at least the input and the output width, e.g. [d, 50, 50, 2]."
            raise ArgumentError("sizes", sizes, "two or more widths", suggestion)
        device = torch.get_default_device() if device is None else device
        layers: list[torch.nn.Module] = []
        for width, next_width in pairwise(sizes):
            # skip_init leaves the weights unset, so that the global RNG is not drawn from.
            layers.append(skip_init(torch.nn.Linear, width, next_width, dtype=dtype, device=device))
            layers.append(activation())
        super().__init__(*layers[:-1])
        self.sizes: tuple[int, ...] = tuple(map(int, sizes))
        self.output_scale: float = float(output_scale)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the start again, in place.

        Args:
            generator: Source of the draws; seed 0 if None.
        """
        generator = seeded(0) if generator is None else generator
        linear = [layer for layer in self if isinstance(layer, torch.nn.Linear)]
        for layer in linear:
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                draw = torch.empty(parameter.shape, dtype=torch.float64, device=generator.device)
                parameter.copy_((2 * draw.uniform_(generator=generator) - 1) * bound)
        # Scaled after the draws, so that the other layers start alike for every scale.
        linear[-1].weight.mul_(self.output_scale)
        linear[-1].bias.mul_(self.output_scale)


class StackedNetwork(torch.nn.Module):
    """Networks of one architecture, each applied to its member of a batch, in one pass.

    Args:
        networks: The networks, whose parameters are copied and whose forward pass
            ``torch.func.vmap`` can batch.

    Raises:
        ArgumentError: There is no network, or they are of several classes.
    """

    @checked
    def __init__(self, networks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        if len(networks) == 0:
            raise ArgumentError("networks", "none", "at least one network")
        first, *others = dict.fromkeys(type(network).__name__ for network in networks)
        if others:
            raise ArgumentError("networks", others[0], f"{first}, as the first")
        parameters, buffers = torch.func.stack_module_state(list(networks))
        # In a tuple it is no submodule: its code is used, never its parameters.
        self._build = (copy.deepcopy(networks[0]),)
        # Names of parameters have no dots: by number, each name in a single network has its own.
        self._keys = {name: f"stack_{index}" for index, name in enumerate(parameters | buffers)}
        for name, parameter in parameters.items():
            self.register_parameter(self._keys[name], torch.nn.Parameter(parameter.detach()))
        for name, buffer in buffers.items():
            self.register_buffer(self._keys[name], buffer)

    def named_stacks(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The stacked parameters, ``(k, ...)``, by their names in a single network."""
        parameters = dict(self.named_parameters())
        return ((name, parameters[key]) for name, key in self._keys.items() if key in parameters)

    def forward(self, x: Tensor) -> Tensor:
        """The output of network i at member i of the points, ``(k, n, d)`` to ``(k, n, q)``."""

        def output(state: dict[str, Any], x: Tensor) -> Tensor:
            return torch.func.functional_call(self._build[0], state, (x,))

        state = {name: getattr(self, key) for name, key in self._keys.items()}
        return torch.func.vmap(output)(state | dict(self.named_stacks()), x)


@checked
def reset_network(network: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Draws a network's start again, in place, without changing the global RNG.

    A module with ``reset_parameters(generator)`` draws from the generator, of seed 0 if None;
    torch's own layers, whose ``reset_parameters()`` takes none, draw under a seed taken from it.
    """
    generator = seeded(0) if generator is None else generator
    with seeded_globally(generator, network.parameters()):
        _reset(network, generator)


def _reset(module: torch.nn.Module, generator: torch.Generator) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        for child in module.children():
            _reset(child, generator)
    elif "generator" in inspect.signature(reset).parameters:
        reset(generator=generator)
    else:
        reset()


@checked(late=True, passes_on="x", x="float (*batch, n, d)")
def apply_network(network: torch.nn.Module, x: Tensor) -> Tensor:
    """Outputs ``(*batch, n, q)`` at ``(*batch, n, d)``, checked for rows and finite values."""
    output = network(x)
    if output.shape[:-1] != x.shape[:-1]:
        suggestion = "The network must map the last dimension only, keeping batch and points."
        expected = f"{tuple(x.shape[:-1])} and one more dimension"
        raise ShapeError("network output", tuple(output.shape), expected, suggestion)
    check_finite_output(output)
    return output


def check_finite_output(output: Tensor) -> None:
    """Raises a NonFiniteError where the output of a network is NaN or infinite."""
    if not all_finite(output):
        count = int((~torch.isfinite(output)).sum())
        got = f"{count} non-finite of {output.numel()} values (shape {tuple(output.shape)}, "
        got += f"dtype {output.dtype})"
        suggestion = "Lower the learning rate, clip gradients, use float64 or restart the network."
        raise NonFiniteError("network output", got, "finite values", suggestion)
