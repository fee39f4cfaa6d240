"""Gradients of a network's outputs at single points, of plain layers as products of two vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from gpclml.curvature.layers import LayerRecord, OuterProducts, record_columns
from gpclml.curvature.structure import (
    Cotangents,
    call_with,
    check_cotangents,
    check_network,
    check_own_outputs,
    differing,
    fresh_parameters,
    in_single,
    probe_weights,
    twice_differentiable,
)

_NUMBERS = 2**24  # of products of single points in memory at a time


def sample_gradients(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    r"""Gradients at single points: the rows :math:`J_n^\top v_{nk}` of each parameter.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.
        cotangents: Maps outputs to the columns v of their curvature.
        names: Names of trained parameters; all if None.

    Returns:
        Rows by the parameter's name, ``(N, K, *shape)``; differentiable in ``x``.

    Note:
        N K P numbers in memory.
    """
    check_network(module)
    every = fresh_parameters(module)
    parameters = every if names is None else {name: every[name] for name in names}

    def outputs(values: Mapping[str, Tensor], points: Tensor) -> Tensor:
        return in_single(call_with(module, {**every, **values}, points))

    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad(), twice_differentiable(module, x.requires_grad):
        values_at_x = outputs(leaves, x)
        columns = cotangents(values_at_x)
    check_cotangents(columns, values_at_x)
    columns = columns if x.requires_grad else columns.detach()

    if not values_at_x.requires_grad:  # outputs do not depend on these parameters
        shape = columns.shape[:2]
        return {name: columns.new_zeros(*shape, *p.shape) for name, p in parameters.items()}
    # A weighted sum of all rows is known from one backward pass of all points.
    weights = probe_weights(columns[..., 0])
    total = torch.einsum("nk,nkc->nc", weights, columns).detach()
    sums = torch.autograd.grad(
        values_at_x, list(leaves.values()), total,
        retain_graph=x.requires_grad, materialize_grads=True,
    )  # fmt: skip

    def add_up(rows: Mapping[str, Tensor]) -> bool:
        if any(rows[name].shape != (*columns.shape[:2], *p.shape) for name, p in leaves.items()):
            return False
        weighted = {
            name: torch.einsum("nk,nk...->...", weights, in_single(row))
            for name, row in rows.items()
        }
        return not differing(weighted, dict(zip(leaves, map(in_single, sums), strict=True)))

    def point_gradients(point: Tensor, vectors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, pull, *_ = vjp(lambda p: outputs(p, point.unsqueeze(0)).squeeze(0), parameters)
        return value, vmap(pull)(vectors)[0]

    result = None
    try:
        with warnings.catch_warnings(), twice_differentiable(module, x.requires_grad):
            warnings.filterwarnings("ignore", "There is a performance drop")
            result = vmap(point_gradients)(x, columns)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError):  # it has no rule for a module
        pass
    # It has a wrong rule for some modules: ``prelu`` of one column at several points.
    if result is None or not add_up(result[1]):
        with twice_differentiable(module, x.requires_grad):
            result = _point_by_point(outputs, leaves, x, columns)
    check_own_outputs(result[0], values_at_x)
    return {name: in_single(rows) for name, rows in result[1].items()}


def _point_by_point(
    outputs: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    leaves: Mapping[str, Tensor],
    x: Tensor,
    columns: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradients at single points, by a backward pass for each column of each."""
    graph = x.requires_grad
    values, rows = [], []
    for point, vectors in zip(x, columns, strict=True):
        with torch.enable_grad():
            value = outputs(leaves, point.unsqueeze(0)).squeeze(0)
        for vector in vectors:  # the graph is kept for the next column
            rows += torch.autograd.grad(
                value, list(leaves.values()), vector,
                retain_graph=True, create_graph=graph, materialize_grads=True,
            )  # fmt: skip
        values.append(value if graph else value.detach())
    gradients = {
        name: torch.stack(rows[k :: len(leaves)]).unflatten(0, columns.shape[:2])
        for k, name in enumerate(leaves)
    }
    return torch.stack(values), gradients


def layer_gradients(
    module: torch.nn.Module,
    x: Tensor,
    cotangents: Cotangents,
    probed: dict[Any, dict[str, str]] | None = None,
) -> Iterator[tuple[str, Tensor | OuterProducts]]:
    """What :func:`sample_gradients` returns, layer after layer, faster where layers are recorded.

    One backward pass a column serves all points. Weights of plain layers have
    :class:`OuterProducts`. What is known of the layers is kept in ``probed``.
    """
    columns, others = record_columns(module, x, cotangents, only=False, probed=probed)
    # Each column has records of all layers; here all columns of a layer are needed at a time.
    for records in zip(*columns, strict=True):
        columns_of_layer = [g for record in records for g in record.raw_gradients]
        record: LayerRecord = replace(records[0], raw_gradients=columns_of_layer)
        yield from record.gradients().items()
    if others:
        yield from sample_gradients(module, x, cotangents, others).items()


def output_gradients(module: torch.nn.Module, x: Tensor) -> dict[str, Tensor | OuterProducts]:
    """Gradients of all outputs at points, by the names of trained parameters.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.

    Returns:
        Gradients, ``(N, C, *shape)``, or :class:`OuterProducts`.

    Note:
        C backward passes, and N C P numbers for layers without outer products.
    """
    return outputs_and_gradients(module, x)[1]


def outputs_and_gradients(
    module: torch.nn.Module, x: Tensor, probed: dict[Any, dict[str, str]] | None = None
) -> tuple[Tensor, dict[str, Tensor | OuterProducts]]:
    """Outputs at points, ``(N, C)``, and what :func:`output_gradients` returns, in one pass.

    Args:
        module: As there.
        x: As there.
        probed: What was found out about the layers, kept for further points of the same weights.
    """
    seen: list[Tensor] = []

    def columns(values: Tensor) -> Tensor:
        seen.append(values if x.requires_grad else values.detach())
        eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        return eye.expand(len(values), *eye.shape)

    gradients = dict(layer_gradients(module, x, columns, probed))
    return seen[0], gradients


def layer_products(rows: OuterProducts, bias: bool) -> Tensor:
    """The sum of products of a layer's gradients over points and columns, ``(p, p)``, float64.

    Weights come first, then biases. The layer is applied once to each point; from products of
    inputs and of gradients N points take N (in out)² operations, K times fewer than from rows.
    """
    gradients, inputs = rows.gradients, rows.inputs.flatten(1)
    out = gradients.shape[-1]
    if bias:  # the weight of an input that is one
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=-1)
    width = inputs.shape[-1]
    # The sum over n of (g gᵀ)_ij (a aᵀ)_kl is one product of two tall matrices.
    step = max(1, _NUMBERS // (out**2 + width**2))
    total = torch.zeros(out**2, width**2, dtype=torch.float64, device=inputs.device)
    for gradient, values in zip(gradients.split(step), inputs.split(step), strict=True):
        g, a = gradient.double(), values.double()
        products = (a.unsqueeze(-1) * a.unsqueeze(-2)).flatten(1)
        total = total + (g.mT @ g).flatten(1).mT @ products
    blocks = total.unflatten(0, (out, out)).unflatten(2, (width, width))
    matrix = blocks.permute(0, 2, 1, 3).reshape(out * width, out * width)
    # From (output, input and bias) to all weights, then all biases, as parameters are ordered.
    index = torch.arange(out * width, device=matrix.device).reshape(out, width)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]]) if bias else index.flatten()
    return matrix[order][:, order]
