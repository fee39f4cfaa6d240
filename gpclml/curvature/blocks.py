"""Structures of the curvature, and the blocks that they keep.

Of all weights, of some of them, or of few directions among all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import check_counts, checked, tensor_like
from gpclml.curvature.layers import (
    LayerRecord,
    LinearRecord,
    OuterProducts,
    Products,
    layer_gradients,
    layer_products,
    record_columns,
    sample_gradients,
    sum_over_chunks,
)
from gpclml.curvature.structure import (
    Cotangents,
    Curvature,
    Draw,
    Draws,
    OutputCovariance,
    Precisions,
    Scale,
    Structure,
    layer_of,
    softmax_columns,
)
from gpclml.errors import UnsupportedError
from gpclml.gram.autograd import Evaluated, Gradients, fitted, precomputed
from gpclml.linalg import safe_cholesky

_NUMBERS = 2**24  # of gradients of outputs in memory at a time
_LARGE = 2000  # weights of a last layer from which its own way pays
_ROWS = 512  # beside those kept, whose largest directions are found at a time
_DOUBLES = 2**20  # converted to float64 at a time, where rows are few


@checked
@dataclass(frozen=True)
class Full(Structure):
    """Structure of the full curvature, of all parameters together.

    Args:
        form: ``"parameters"`` for a P x P matrix, ``"samples"`` for N K x N K, ``"smaller"`` for
            the smaller of both.

    Note:
        Costs the cube of the smaller of P and N K, and N K P numbers in memory. Products of
        gradients are summed in float64: where noise is small, single precision loses what weakly
        determined weights have. A last layer of d inputs under a softmax of C classes, C d above
        2,000 and N below half of it, costs C d³ + N² C d by Woodbury's identity.
    """

    form: Literal["smaller", "parameters", "samples"] = "smaller"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> Curvature:
        """The matrix of all parameters together; see :meth:`Structure.of`."""
        seen: list[Tensor] = []

        def noted(outputs: Tensor) -> Tensor:
            seen[:] = outputs, cotangents(outputs)
            return seen[1]

        gradients, block = dict(layer_gradients(module, x, noted)), None
        # Woodbury's form has no derivative with respect to the points.
        if self.form == "smaller" and not x.requires_grad:
            block = LastSoftmax.from_gradients(gradients, *seen)
        return Block.from_gradients(gradients, self.form) if block is None else block


@checked
@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """Structure of independent blocks, one for each layer or each parameter tensor.

    The log-determinant is at least that of the full curvature (Fischer's inequality; Immer et
    al. 2023, Theorem 1), so that the evidence is a lower bound.

    Args:
        by: ``"layer"`` for a module with its weight and bias, or ``"parameter"``.
    """

    by: Literal["layer", "parameter"] = "layer"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> BlockCurvature:
        """A dense matrix for each block; see :meth:`Structure.of`."""
        blocks: dict[str, dict[str, Tensor | OuterProducts]] = {}
        for name, rows in layer_gradients(module, x, cotangents):
            blocks.setdefault(layer_of(name) if self.by == "layer" else name, {})[name] = rows
        return BlockCurvature([Block.from_gradients(block) for block in blocks.values()])


@dataclass(frozen=True)
class Diagonal(Structure):
    """Structure of independent parameters: the loosest bound (Immer et al. 2023, Theorem 1).

    Note:
        Costs K backward passes. So many points are in memory at a time as take about 64 MiB.
    """

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        """The sum of squared gradients of each parameter; see :meth:`Structure.of`."""

        def diagonal(*given: Any) -> DiagonalCurvature:
            return DiagonalCurvature.from_gradients(layer_gradients(*given))

        return sum_over_chunks(diagonal, module, x, cotangents, all_columns=True)


@dataclass(frozen=True)
class FunctionSpace(Structure):
    """Structure of the full curvature in function space, by inner products of layers.

    It serves stochastic estimates of a large network's evidence from few points and outputs (Immer
    et al. 2023, Section 4), and is exact for every network.

    Note:
        Costs K backward passes and (N K)² (in + out) operations for each linear layer.
        Convolutions, parameters of other modules, and layers that :class:`Kronecker` refuses, such
        as tied ones, need gradients at single points, N K times the size of their parameters.
    """

    @override
    def of(
        self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents
    ) -> FunctionSpaceCurvature:
        """A matrix of the size of the points for each parameter; see :meth:`Structure.of`."""
        grams: dict[str, Tensor] = {}
        last = gram = torch.zeros(())
        for name, rows in layer_gradients(module, x, cotangents):
            gradients = rows.gradients if isinstance(rows, OuterProducts) else rows
            if gradients is not last:  # a bias has the gradients of outputs that its weight has
                last, gram = gradients, _gram(_flat(gradients).flatten(0, 1))
            grams[name] = gram
            if isinstance(rows, OuterProducts):
                # Inner products of g aᵀ are products of those of g and of a.
                k = gradients.shape[1]
                inputs = (
                    _gram(rows.inputs.flatten(1)).repeat_interleave(k, 0).repeat_interleave(k, 1)
                )
                grams[name] = inputs * gram
        return FunctionSpaceCurvature(grams)


@checked
@dataclass(frozen=True)
class Kronecker(Structure):
    r"""Structure of Kronecker factors for each layer: :math:`H \approx B \otimes A`.

    :math:`A` is the mean over points of :math:`a a^\top`, :math:`B` the sum over points and columns
    of :math:`g g^\top` (Martens and Grosse 2015; with weights shared by positions of a point,
    Eschenhagen et al. 2023). It is exact for one point with one position and for a linear network's
    last layer. It gives no bound of the evidence: with a = g = (0, 2) on two points its
    log-determinant is smaller than the exact one.

    Linear layers and convolutions, with groups too, have factors. Scale and shift of a batch
    (in eval mode), layer, group or RMS normalization have one exact block a layer.

    Args:
        sharing: Treatment of the positions of a convolution: ``"expand"`` treats them as points;
            with ``"reduce"`` a is their mean and g their sum, as averaged augmentations need.
        others: Treatment of all other parameters. These are the parameters of other modules
            (embeddings, attention, recurrent layers, transposed convolutions) and of layers whose
            inputs and outputs do not determine the gradient: subclasses (LoRA); pruned or
            parametrized layers (weight and spectral norm); layers with hooks, or whose first
            dimension is not that of points; and weights that are tied, used by a function, or
            applied twice. ``"refuse"`` raises an error that names them; ``"diagonal"`` gives them
            their exact diagonal.

    Note:
        Costs K backward passes and, for each layer, the eigenvalues of an in x in and an out x out
        matrix, or of smaller ones if points are fewer. So many points are in memory at a time as
        take about 64 MiB.
    """

    sharing: Literal["expand", "reduce"] = "expand"
    others: Literal["refuse", "diagonal"] = "refuse"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> BlockCurvature:
        """Two factors for each layer; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents)

    def _of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> BlockCurvature:
        blocks: dict[int, Factors | Block] = {}
        columns, names = record_columns(module, x, cotangents, only=self.others == "refuse")
        for records in columns:  # one after the other takes less memory than all
            for layer, record in enumerate(records):
                first = layer not in blocks
                block = _recorded_block(record, self.sharing == "reduce", first)
                blocks[layer] = block if first else blocks[layer] + cast(Any, block)
        # Normalizations come behind layers with factors, whose draws come first.
        ordered: list[Any] = sorted(blocks.values(), key=lambda block: isinstance(block, Block))
        if names:
            rows = sample_gradients(module, x, cotangents, names)
            ordered.append(DiagonalCurvature.from_gradients(rows.items()))
        return BlockCurvature(ordered)


def _recorded_block(record: LayerRecord, reduce: bool, first: bool) -> Factors | Block:
    """Factors, or the block of a normalization, of one column; inputs come with the first."""
    if not isinstance(record, LinearRecord):
        return Block.from_gradients(record.gradients())
    inputs, count = None, 0
    if first and record.weight is not None:
        inputs, count = record.input_products(reduce)
    gradients = record.gradient_products(reduce)
    return Factors(record.weight, record.bias, gradients, inputs, count, record.shape)


@dataclass(frozen=True)
class BlockCurvature(Curvature):
    """A curvature of independent blocks of parameters.

    Attributes:
        blocks: Curvature of each block.
    """

    blocks: Sequence[Any]

    @property
    def names(self) -> list[str]:
        """Names of the parameters, block by block."""
        return [name for block in self.blocks for name in block.names]

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """The sum over blocks, in float64 until it is made."""
        terms = [block.log_det_ratio(precisions, scale).double() for block in self.blocks]
        return torch.stack(terms).sum().to(next(iter(precisions.values())).dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        draws = (block._draws(precisions, scale, count, draw) for block in self.blocks)
        return reduce(operator.or_, draws)

    @override
    @torch.no_grad()
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """The sum over blocks."""
        terms = [block.output_covariance(precisions, float(scale)) for block in self.blocks]
        return lambda *given: torch.stack([term(*given) for term in terms]).sum(0)

    @override
    def __add__(self, other: Self) -> Self:
        mine, theirs = ([block.names for block in c.blocks] for c in (self, other))
        if mine != theirs:
            got = f"Kronecker factors of {theirs}"
            raise UnsupportedError("curvature", got, f"factors of {mine}", "Use Full for a sum.")
        return type(self)([a + b for a, b in zip(self.blocks, other.blocks, strict=True)])


@dataclass(frozen=True)
class LastSoftmax(Curvature):
    r"""The curvature of a last layer under a softmax, a block for each class less N products.

    .. math:: H = \sum_n (\mathrm{diag}(p_n) - p_n p_n^\top) \otimes a_n a_n^\top = B - U U^\top

    Woodbury's identity takes the N columns :math:`p_n \otimes a_n` of U from C blocks of the size
    of the inputs.

    Attributes:
        weight: Name of its weight.
        bias: Name of its bias, whose input is the last one; None without one.
        inputs: a, ``(N, d)``, float64.
        probabilities: p, ``(N, C)``, float64.
    """

    weight: str
    bias: str | None
    inputs: Tensor
    probabilities: Tensor

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed from the rest."""
        return {field.name: vars(self)[field.name] for field in fields(self)}

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor]:
        """U, ``(C, d, N)``, and B, ``(C, d, d)``, which no hyperparameter changes."""
        u = self.probabilities.mT.unsqueeze(1) * self.inputs.mT
        return u, u @ self.inputs

    @cached_property
    def _last(self) -> list[Any]:
        """Prior deviations, the scale, and the factors there, as computed last."""
        return []

    @classmethod
    def from_gradients(
        cls, gradients: Mapping[str, Tensor | OuterProducts], outputs: Tensor, columns: Tensor
    ) -> LastSoftmax | None:
        """That of these gradients, if they are of a large last layer under a softmax; else None."""
        (weight, rows), *others = gradients.items()
        if not isinstance(rows, OuterProducts) or len(rows.shape) != 4 or len(others) > 1:
            return None
        # A bias has the very gradients of its layer's outputs; other parameters have their own.
        if any(values is not rows.gradients for _, values in others):
            return None
        bias, p = others[0][0] if others else None, outputs.detach().softmax(-1)
        inputs = rows.inputs.detach().double()
        inputs = inputs if bias is None else torch.nn.functional.pad(inputs, (0, 1), value=1)
        made = cls(weight, bias, inputs, p.double())
        # Comparisons wait for a GPU, so that sizes are asked first.
        if not made._pays or not torch.equal(columns, softmax_columns(p)):
            return None
        return made if torch.equal(rows.gradients, columns) else None

    @property
    def _pays(self) -> bool:
        size = self.probabilities.shape[1] * self.inputs.shape[1]
        return size > _LARGE and 2 * len(self.inputs) < size

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def _roots(self, precisions: Precisions) -> Tensor:
        """Prior standard deviations, ``(C, d)``."""
        classes, width = self.probabilities.shape[1], self.inputs.shape[1]
        inputs = width - (self.bias is not None)
        roots = [precisions[self.weight].double().rsqrt().expand(classes, inputs)]
        if self.bias is not None:
            roots.append(precisions[self.bias].double().rsqrt().expand(classes).unsqueeze(-1))
        return torch.cat(roots, dim=-1)

    def _factors(self, precisions: Precisions, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
        r"""Factors of the covariance, :math:`R L^{-\top} (I + s W^\top W) L^{-1} R`.

        L⁻¹ of :math:`I + s R B R = L L^\top`, ``(C, d, d)``; W, ``(C, N, d)``, which is
        :math:`U^\top R L^{-\top}` solved by the factor of
        :math:`I - s U^\top R (I + s R B R)^{-1} R U`; and half of log :math:`|I + s R H R|`.
        """
        root = self._roots(precisions)
        # A search ends where it has been last, and predictions go on from there.
        if self._last and torch.equal(self._last[0], root) and self._last[1] == scale:
            return self._last[2]
        u, b = self._products
        eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        factor = safe_cholesky(eye + scale * root.unsqueeze(-1) * b * root.unsqueeze(-2))
        inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
        seen = (inverse * root.unsqueeze(-2)) @ u
        flat = seen.flatten(0, 1)
        # Under vague priors the difference from one is rounding, by which the diagonal is raised.
        inner = torch.eye(len(flat.mT), dtype=b.dtype, device=b.device)
        inner *= 1 + len(inner) * torch.finfo(b.dtype).eps
        inner = safe_cholesky(inner - scale * (flat.mT @ flat))
        solved = torch.linalg.solve_triangular(inner, flat.mT, upper=False)
        half = inner.diagonal().log().sum() - inverse.diagonal(dim1=-2, dim2=-1).log().sum()
        factors = inverse, solved.unflatten(1, seen.shape[:2]).transpose(0, 1), half
        self._last[:] = root, float(scale), factors
        return factors

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From factors of the blocks and of the matrix of the points; differentiable once."""
        given = [precisions[name] for name in self.names]
        tensors = [v for v in (*given, scale) if isinstance(v, Tensor) and v.requires_grad]
        with torch.no_grad():
            inverse, solved, half = self._factors(precisions, scale)

        def vjp(grad: Tensor) -> Gradients:
            # Variances V of weights in units of the prior: the logarithm of a precision has the
            # slope V - 1, that of the scale their sum with the sign turned.
            outer = inverse + scale * (solved.mT @ solved @ inverse)
            slope, gradients = grad * ((inverse * outer).sum(-2) - 1), []
            width = slope.shape[1] - (self.bias is not None)
            for precision, slopes in zip(given, (slope[:, :width], slope[:, width:]), strict=False):
                total = slopes.reshape(precision.shape) if precision.numel() > 1 else slopes.sum()
                gradients.append((precision, fitted(total / precision, precision)))
            if isinstance(scale, Tensor):
                gradients.append((scale, fitted(-slope.sum() / scale, scale)))
            return gradients

        return precomputed(Evaluated(2 * half, tensors, vjp), precisions[self.weight].dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        # The sum of two independent draws.
        inverse, solved, _ = self._factors(precisions, scale)
        normal = draw(count, *inverse.shape[:2]).double().permute(1, 2, 0)
        other = draw(count, solved.shape[1]).double().mT
        values = inverse.mT @ (normal + scale**0.5 * (solved.mT @ other))
        values = values.permute(2, 0, 1) * self._roots(precisions)
        values = values.to(precisions[self.weight].dtype)
        if self.bias is None:
            return {self.weight: values}
        return {self.weight: values[..., :-1], self.bias: values[..., -1]}

    @override
    @torch.no_grad()
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From the same factors."""
        inverse, solved, _ = self._factors(precisions, scale)
        root = self._roots(precisions)

        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            # Of outputs that are those of the layer each output has the inputs of its class.
            a = gradients[self.weight].inputs.double()
            a = a if self.bias is None else torch.nn.functional.pad(a, (0, 1), value=1)
            moved = inverse @ (root.unsqueeze(-1) * a.mT)  # (C, d, points)
            low = (solved @ moved).permute(1, 2, 0).flatten(1)  # (N, points C)
            blocks = _group_products(low, together * len(moved)) * scale
            points = moved.mT.unflatten(1, (-1, together))  # (C, groups, q, d)
            per_class = (points @ points.mT).permute(1, 2, 3, 0)  # (groups, q, q, C)
            view = blocks.unflatten(2, (together, -1)).unflatten(1, (together, -1))
            view.diagonal(dim1=2, dim2=4).add_(per_class)
            return blocks.to(gradients[self.weight].gradients)

        return covariance

    @override
    def __add__(self, other: Any) -> Any:
        if isinstance(other, LastSoftmax):
            pairs = (self.inputs, other.inputs), (self.probabilities, other.probabilities)
            joined = replace(self, inputs=torch.cat(pairs[0]), probabilities=torch.cat(pairs[1]))
            return joined if joined._pays else joined.dense()
        return self.dense() + other

    def dense(self) -> Block:
        """The same matrix as a block."""
        chunks = []
        for a, p in zip(self.inputs.split(256), self.probabilities.split(256), strict=True):
            columns = softmax_columns(p)
            inputs = a if self.bias is None else a[:, :-1]
            rows: dict[str, Tensor | OuterProducts] = {self.weight: OuterProducts(columns, inputs)}
            if self.bias is not None:
                rows[self.bias] = columns
            chunks.append(Block.from_gradients(rows))
        return reduce(Block.__add__, chunks)


@dataclass(frozen=True)
class Block(Curvature):
    """A block as its rows, ``(N K, p)``, or as the product of these, ``(p, p)`` in float64."""

    shapes: Mapping[str, torch.Size]
    is_rows: bool
    matrix: Tensor

    @classmethod
    def from_gradients(
        cls, gradients: Mapping[str, Tensor | OuterProducts], form: str = "smaller"
    ) -> Block:
        """The block of parameters from their gradients by name, ``(N, K, *shape)``."""
        shapes = {name: rows.shape[2:] for name, rows in gradients.items()}
        first, *others = gradients.values()
        sums = first.gradients if isinstance(first, OuterProducts) else first
        size = sum(shape.numel() for shape in shapes.values())
        is_rows = form == "samples" or (form == "smaller" and first.shape[:2].numel() < size)
        # A layer alone, with its bias: K times fewer operations than from rows.
        if isinstance(first, OuterProducts) and not is_rows and all(b is sums for b in others):
            return cls(shapes, False, layer_products(first, bias=bool(others)))
        rows = torch.cat([_flat(rows) for rows in gradients.values()], dim=-1).flatten(0, 1)
        return cls(shapes, is_rows, rows if is_rows else _gram(rows.mT))

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.shapes)

    def _roots(self, precisions: Precisions) -> Tensor:
        """Prior standard deviations, ``(p,)``."""
        roots = [precisions[k].rsqrt().expand(shape).flatten() for k, shape in self.shapes.items()]
        return torch.cat(roots)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From a Cholesky factor."""
        # |s H + P| / |P| = |I + s R H R| with R² = P⁻¹; of rows by Sylvester's identity.
        root = self._roots(precisions)
        if self.is_rows:
            inner = _gram(self.matrix * root)
        else:
            inner = self.matrix * root * root.unsqueeze(-1)
        return _log_det(inner, scale).to(root.dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        root = self._roots(precisions)
        prior = draw(count, len(root))  # of standardized weights
        if self.is_rows:
            # Matheron's rule: a draw from the prior, moved by what noisy rows say of it.
            rows = scale**0.5 * self.matrix * root
            factor = _factor(_gram(rows)).to(rows.dtype)
            seen = prior @ rows.mT + draw(count, len(rows))
            values = prior - torch.cholesky_solve(seen.mT, factor).mT @ rows
        else:
            inner = scale * self.matrix * root * root.unsqueeze(-1)
            factor = _factor(inner).to(prior.dtype)
            values = torch.linalg.solve_triangular(factor.mT, prior.mT, upper=True).mT
        draws = (root * values).split([n.numel() for n in self.shapes.values()], dim=-1)
        pairs = zip(self.shapes.items(), draws, strict=True)
        return {name: values.reshape(count, *shape) for (name, shape), values in pairs}

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From a Cholesky factor."""
        root = self._roots(precisions).double()
        rows = scale**0.5 * self.matrix * root
        factor = _factor(_gram(rows) if self.is_rows else scale**0.5 * root.unsqueeze(-1) * rows)

        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            flat = torch.cat([_flat(gradients[name]) for name in self.shapes], dim=-1)
            columns, size = (flat * root).flatten(0, 1).mT, together * flat.shape[1]
            seen = rows @ columns if self.is_rows else columns
            solved = torch.linalg.solve_triangular(factor, seen, upper=False)
            known = _group_products(solved, size)
            if self.is_rows:  # what rows tell is taken from the prior's covariance
                known = _group_products(columns, size) - known
            return known.to(flat)

        return in_chunks(covariance, len(root))

    @override
    def __add__(self, other: Any) -> Any:
        other = other.dense() if isinstance(other, LastSoftmax) else other
        if self.is_rows and other.is_rows:
            rows = torch.cat([self.matrix, other.matrix])
            few = len(rows) < rows.shape[1]
            return replace(self, is_rows=few, matrix=rows if few else _gram(rows.mT))
        mine, theirs = (b._product() for b in (self, other))
        return replace(self, is_rows=False, matrix=mine + theirs)

    def _product(self) -> Tensor:
        return _gram(self.matrix.mT) if self.is_rows else self.matrix


@dataclass(frozen=True)
class DiagonalCurvature(Curvature):
    r"""The diagonal of the curvature, :math:`h = \sum_{nk} (J_n^\top v_{nk})^{\circ 2}`.

    Attributes:
        diagonal: Diagonal of each parameter by name, in the parameter's shape.
    """

    diagonal: Mapping[str, Tensor]

    @classmethod
    def from_gradients(
        cls, gradients: Iterable[tuple[str, Tensor | OuterProducts]]
    ) -> DiagonalCurvature:
        """The diagonal from pairs of a name and gradients, ``(N, K, *shape)``, one at a time."""
        diagonal = {}
        for name, rows in gradients:
            if isinstance(rows, OuterProducts):
                squares = rows.gradients.square().sum(1).mT @ rows.inputs.flatten(1).square()
                diagonal[name] = squares.reshape(rows.shape[2:])
            else:
                diagonal[name] = rows.square().sum((0, 1))
        return cls(diagonal)

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.diagonal)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """The sum over single parameters."""
        # log1p keeps what weights have that the data hardly determine.
        terms = [
            (scale * h.double() / precisions[name]).log1p().sum()
            for name, h in self.diagonal.items()
        ]
        return torch.stack(terms).sum().to(next(iter(precisions.values())).dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        return {
            name: draw(count, *h.shape) * (scale * h + precisions[name]).rsqrt()
            for name, h in self.diagonal.items()
        }

    @override
    @torch.no_grad()
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """The sum over single parameters."""
        weights = {name: 1 / (scale * h + precisions[name]) for name, h in self.diagonal.items()}

        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            terms = [_weighted_products(gradients[k], w, together) for k, w in weights.items()]
            return torch.stack(terms).sum(0)

        return covariance

    @override
    def __add__(self, other: Self) -> Self:
        return type(self)({k: h + other.diagonal[k] for k, h in self.diagonal.items()})


@dataclass(frozen=True)
class Factors(Curvature):
    r"""Kronecker factors of a layer: :math:`B \otimes A` of its weight, B of its bias.

    Attributes:
        weight: Name of its weight; None if it is not trained.
        bias: Name of its bias; None if that is not trained, or there is none.
        gradients: B, the sum of g gᵀ; with several groups one for each.
        inputs: A times the number of its terms, the sum of a aᵀ; None without a weight.
        count: Number of terms of that sum.
        shape: Shape of the weight.
    """

    weight: str | None
    bias: str | None
    gradients: Products
    inputs: Products | None
    count: int
    shape: torch.Size

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for name in (self.weight, self.bias) if name is not None]

    @cached_property
    def eigenvalues(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Eigenvalues of B and A by the parameter's name, ``(*G, b)`` and ``(*G, a)``; float64.

        Some that are zero are left out. For a bias the latter is one.
        """
        # Those of B ⊗ A are all products of the two; rows of few points have few of them.
        b, values = self.gradients.eigenvalues(), {}
        if self.bias is not None:
            values[self.bias] = b, torch.ones_like(b[..., :1])
        if self.weight is not None and self.inputs is not None:
            values[self.weight] = b, self.inputs.eigenvalues() / self.count
        return values

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From the eigenvalues of both factors, in float64."""
        _check_numbers(precisions, self.names)
        terms = [
            ((scale / precisions[name]).double() * b.unsqueeze(-1) * a.unsqueeze(-2)).log1p().sum()
            for name, (b, a) in self.eigenvalues.items()
        ]
        return torch.stack(terms).sum()

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        """Draws of weights with covariance (s B ⊗ A + δ I)⁻¹ of each block, by eigenvectors."""
        draws = {}
        for name, (left, right, deviation) in self._spectra(precisions, scale).items():
            normal = draw(count, *deviation.shape)
            values = (left @ (normal.double() * deviation) @ right.mT).to(normal)
            draws[name] = values.reshape(count, *(self.shape if name == self.weight else (-1,)))
        return draws

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From the eigenvectors of both factors."""
        spectra = self._spectra(precisions, float(scale))

        # In float64: where a prior is vague, the deviation of what the data do not determine is so
        # large that the rounding of a turned gradient would be seen.
        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            terms = []
            for name, (left, right, deviation) in spectra.items():
                rows = gradients[name]
                if isinstance(rows, OuterProducts):
                    inputs = rows.inputs.flatten(1).double()
                    turned = OuterProducts(rows.gradients.double() @ left, inputs @ right)
                else:
                    blocks = rows.reshape(*rows.shape[:2], *deviation.shape).double()
                    turned = left.mT @ blocks @ right
                terms.append(_weighted_products(turned, deviation.square(), together))
            return torch.stack(terms).sum(0).to(next(iter(precisions.values())))

        return covariance

    def _spectra(
        self, precisions: Precisions, scale: float
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Eigenvectors of B and A by name, and deviations in their directions; float64."""
        _check_numbers(precisions, self.names)
        dtype = next(iter(precisions.values())).dtype
        b, left = torch.linalg.eigh(self.gradients.matrix())
        b = _above_rounding(b, dtype).unsqueeze(-1)
        spectra = {}
        if self.weight is not None and self.inputs is not None:
            a, right = torch.linalg.eigh(self.inputs.matrix() / self.count)
            products = b * _above_rounding(a, dtype).unsqueeze(-2)
            deviation = (scale * products + precisions[self.weight]).rsqrt()
            spectra[self.weight] = left, right, deviation
        if self.bias is not None:
            deviation = (scale * b + precisions[self.bias]).rsqrt()
            spectra[self.bias] = left, torch.ones_like(b[..., :1, :]), deviation
        return spectra

    @override
    def __add__(self, other: Factors) -> Factors:
        # Further columns of the same points bring no inputs.
        inputs = self.inputs
        if inputs is not None and other.inputs is not None:
            inputs = inputs + other.inputs
        gradients, count = self.gradients + other.gradients, self.count + other.count
        return replace(self, gradients=gradients, inputs=inputs, count=count)


@dataclass(frozen=True)
class FunctionSpaceCurvature(Curvature):
    r"""Inner products :math:`v_{nk}^\top J_n J_m^\top v_{ml}`, a matrix for each parameter.

    Its log-determinant, :math:`\log |I + s V^\top J P_0^{-1} J^\top V|`, is that of the full
    curvature. It supports neither draws nor sums.

    Attributes:
        grams: Inner products by the parameter's name, ``(N K, N K)``, in float64.
    """

    grams: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.grams)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """The same number as that of the full curvature, from a matrix of N K columns."""
        _check_numbers(precisions, self.names)
        # |I + s Vᵀ J P⁻¹ Jᵀ V| = |I + s P⁻¹ H|, where products of parameters add up.
        # One after the other: all of them at once would take as much memory again.
        scaled = (gram / precisions[name] for name, gram in self.grams.items())
        kernel = reduce(torch.add, scaled)
        return _log_det(kernel, scale).to(next(iter(precisions.values())).dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        raise UnsupportedError("curvature", "a FunctionSpace", "one with draws", "Use Full.")

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """Raises an :class:`UnsupportedError`: the curvature keeps no gradients."""
        raise UnsupportedError("curvature", "a FunctionSpace", "one with a posterior", "Use Full.")

    @override
    def __add__(self, other: Self) -> Self:
        raise UnsupportedError(
            "curvature", "a FunctionSpace over several batches", "one batch", "Use Full for a sum."
        )


@checked
@dataclass(frozen=True)
class Subnetwork(Structure):
    """Structure of some weights, all others being constants (Daxberger et al. 2021).

    Args:
        indices: Numbers of the weights in their flattened parameter, by its name. Other parameters
            must not require a gradient.
        structure: ``"full"`` for a matrix of all of these weights, ``"diag"`` for independent ones.

    Note:
        Costs as :class:`Full` or :class:`Diagonal` of so many weights. Of layers that are not
        linear the gradients of all weights are formed, of so many points as take about 64 MiB.
    """

    indices: Mapping[str, Tensor]
    structure: Literal["full", "diag"] = "full"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> SubnetworkCurvature:
        """The curvature of these weights; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents, all_columns=True)

    def _of(
        self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents
    ) -> SubnetworkCurvature:
        rows: dict[str, Tensor | OuterProducts] = {}
        shapes: dict[str, torch.Size] = {}
        for name, gradients in layer_gradients(module, x, cotangents):
            rows[name] = _chosen_columns(gradients, self.indices[name])
            shapes[name] = gradients.shape[2:]
        full = self.structure == "full"
        inner = (
            Block.from_gradients(rows) if full else DiagonalCurvature.from_gradients(rows.items())
        )
        return SubnetworkCurvature(inner, dict(self.indices), shapes)


def _chosen_columns(rows: Tensor | OuterProducts, index: Tensor) -> Tensor:
    """Gradients ``(N, K, *shape)`` with respect to some entries of a parameter, ``(N, K, p)``."""
    if isinstance(rows, Tensor):
        return rows.flatten(2)[..., index.to(rows.device)]
    inputs, index = rows.inputs.flatten(1), index.to(rows.inputs.device)
    width = inputs.shape[1]
    return rows.gradients[..., index // width] * inputs[:, index % width].unsqueeze(1)


@dataclass(frozen=True)
class SubnetworkCurvature(Curvature):
    """The curvature of some weights.

    Attributes:
        inner: That of the chosen weights of each parameter as one vector.
        indices: Their numbers in the flattened parameter, by its name.
        shapes: Shapes of the parameters.
    """

    inner: Any
    indices: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have chosen weights."""
        return list(self.shapes)

    def _chosen_precisions(self, precisions: Precisions) -> dict[str, Tensor]:
        values = {name: precisions[name] for name in self.names}
        return {
            name: value.flatten()[self.indices[name].to(value.device)] if value.ndim else value
            for name, value in values.items()
        }

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """That of the chosen weights."""
        return self.inner.log_det_ratio(self._chosen_precisions(precisions), scale)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        chosen = self.inner._draws(self._chosen_precisions(precisions), scale, count, draw)
        draws = {}
        for name, values in chosen.items():
            whole = values.new_zeros(count, self.shapes[name].numel())
            whole[:, self.indices[name].to(values.device)] = values
            draws[name] = whole.reshape(count, *self.shapes[name])
        return draws

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """That of the chosen weights."""
        inner = self.inner.output_covariance(self._chosen_precisions(precisions), scale)

        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            rows = {k: _chosen_columns(gradients[k], index) for k, index in self.indices.items()}
            return inner(rows, together)

        return in_chunks(covariance, sum(map(len, self.indices.values())))

    @override
    def __add__(self, other: Self) -> Self:
        return replace(self, inner=self.inner + other.inner)


@checked
@dataclass(frozen=True)
class LowRank(Structure):
    r"""Structure of the directions with the largest curvature among all weights.

    .. math:: H \approx \sum_{r \le R} \lambda_r u_r u_r^\top

    with the largest eigenvalues of H and their vectors; of more than 512 gradients, of the sum of
    what was kept of those before and the next ones. In all other directions the posterior is the
    prior: variances are no smaller than those of :class:`Full`, and the evidence is larger, by much
    where the rank is small. It pays where points unlike the data are to be told from others.

    Args:
        rank: Number R of directions. From N K on, the number of gradients, nothing is left out.

    Note:
        R P numbers in memory, where :class:`Full` takes the smaller of P² and N K P, and as many of
        gradients as take about 64 MiB. Costs N K (R + 512) P.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        check_counts(rank=self.rank)

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> LowRankCurvature:
        """The largest directions; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents, all_columns=True, dense=True)

    def _of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> LowRankCurvature:
        block = Block.from_gradients(dict(layer_gradients(module, x, cotangents)), "samples")
        rows = _principal_rows(block.matrix, self.rank)
        return LowRankCurvature(block.shapes, True, rows, self.rank)


def _principal_rows(rows: Tensor, rank: int) -> Tensor:
    """Rows ``(rank, p)`` whose products are the largest part of those of rows ``(m, p)``."""
    kept = rows[:0].double()
    for block in rows.split(max(rank, _ROWS)):  # the cube of all rows would cost more
        kept = torch.cat([kept, block.double()])
        if len(kept) > rank:
            _, vectors = torch.linalg.eigh(kept @ kept.mT)
            kept = vectors[:, -rank:].mT @ kept
    return kept.to(rows)


@dataclass(frozen=True)
class LowRankCurvature(Block):
    """A curvature as few rows, ``(R, P)``.

    Attributes:
        rank: The most rows that are kept.
    """

    rank: int

    @override
    def __add__(self, other: Any) -> Any:
        if not isinstance(other, LowRankCurvature):
            got = f"{type(other).__name__} beside a curvature of low rank"
            raise UnsupportedError("curvature", got, "one of low rank", "Use Full for a sum.")
        rows = torch.cat([self.matrix, other.matrix])
        return replace(self, matrix=_principal_rows(rows, self.rank))


def in_chunks(covariance: OutputCovariance, size: int) -> OutputCovariance:
    """The same function for few points at a time, whose gradients have this number of entries."""

    def in_turn(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
        count, outputs = next(iter(gradients.values())).shape[:2]
        step = together * max(1, _NUMBERS // (together * outputs * size))
        chunks = [slice(first, first + step) for first in range(0, count, step)]
        return torch.cat(
            [covariance({k: g[chunk] for k, g in gradients.items()}, together) for chunk in chunks]
        )

    return in_turn


def _check_numbers(precisions: Precisions, names: Sequence[str]) -> None:
    """Raises where the weights of a parameter have precisions of their own."""
    for name in names:
        if precisions[name].numel() > 1:
            raise UnsupportedError(
                "precisions", f"one for each weight of {name}", "one for each parameter tensor",
                "Use Full, BlockDiagonal or Diagonal.",
            )  # fmt: skip


def _above_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvalues, ``(*G, p)``, at least as large as their rounding, of vectors of this type.

    Directions in which vague priors would else have all the variance are known to this accuracy.
    """
    eps = max(torch.finfo(dtype).eps ** 2, torch.finfo(values.dtype).eps)
    return values.clamp_min(values.shape[-1] * eps * values.amax(-1, keepdim=True).clamp_min(0.0))


def _factor(matrix: Tensor, scale: Scale = 1.0) -> Tensor:
    """Cholesky factor of I + s M, with the diagonal of M raised by its rounding.

    Under a vague prior, s M far above I, a jitter of the mean diagonal would hide small curvature.
    """
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    rounding = 1 + len(matrix) * torch.finfo(matrix.dtype).eps * eye
    return safe_cholesky(torch.addcmul(eye, matrix * rounding, tensor_like(scale, matrix)))


def _log_det(matrix: Tensor, scale: Tensor | float) -> Tensor:
    return 2 * _factor(matrix, scale).diagonal().log().sum()


def _flat(rows: Tensor | OuterProducts) -> Tensor:
    """Gradients ``(N, K, *shape)`` as ``(N, K, p)``."""
    dense = rows if isinstance(rows, Tensor) else rows.dense()
    return dense.reshape(*rows.shape[:2], -1)


def _group_products(columns: Tensor, size: int) -> Tensor:
    """Inner products of each so many columns, ``(p, n)`` to ``(n / size, size, size)``."""
    rows = columns.mT.unflatten(0, (-1, size))
    return rows @ rows.mT


def _weighted_products(rows: Tensor | OuterProducts, weights: Tensor, together: int) -> Tensor:
    """Inner products ``(N / q, q C, q C)`` of gradients, with a weight for each entry."""
    if isinstance(rows, OuterProducts):
        return rows.weighted_products(weights, together)
    flat = _flat(rows).unflatten(0, (-1, together)).flatten(1, 2)
    return (flat * weights.flatten()) @ flat.mT


def _gram(rows: Tensor) -> Tensor:
    """Inner products of rows ``(m, p)``, summed over their columns in float64."""
    if rows.dtype == torch.float64:
        return rows @ rows.mT
    chunks = map(Tensor.double, rows.split(max(1024, _DOUBLES // len(rows)), dim=-1))
    return reduce(torch.add, (chunk @ chunk.mT for chunk in chunks))
