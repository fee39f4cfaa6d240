"""Every kind of covariance answers as the matrix that it stands for, by brute force."""

import itertools

import pytest
import torch
from gpytorch.kernels import RQKernel, ScaleKernel
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator import to_linear_operator

import reference
from gpclml.gram import closed_form
from gpclml.linalg import (
    ConjugateGradients,
    DenseCovariance,
    GramCovariance,
    IterativeCovariance,
    KroneckerCovariance,
    LowRankPlusDiagonal,
)

N, TASKS = 8, 2
TIGHT = ConjugateGradients(tolerance=1e-12, max_error=1e-9, preconditioner_rank=4)


class Problem:
    """A covariance of n points, what it is made of, and its matrix by definition."""

    def __init__(self, kind, batch=(), dtype=torch.float64, n=N, seed=0):
        self.n, self.batch, self.dtype = n, torch.Size(batch), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves = []
        self.covariance, self.matrix = KINDS[kind](self)

    def leaf(self, *shape, positive=False):
        """Numbers that single precision has too."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        values = 0.1 + values.square() if positive else values
        self.leaves.append(values.float().to(self.dtype).requires_grad_())
        return self.leaves[-1]

    def diagonal(self, values):
        return torch.diag_embed(values.expand(*self.batch, values.shape[-1]))


def dense(problem):
    root = problem.leaf(*problem.batch, problem.n, problem.n)
    matrix = root @ root.mT + torch.eye(problem.n, dtype=root.dtype)
    return DenseCovariance(matrix), matrix


def low_rank(rank):
    def make(problem):
        features = problem.leaf(*problem.batch, problem.n, rank)
        noise = problem.leaf(problem.n, positive=True)
        matrix = features @ features.mT + problem.diagonal(noise)
        return LowRankPlusDiagonal(features, noise), matrix

    return make


def gram(one_noise, shared=False):
    """A kernel in closed form, with one noise variance or one for each point."""

    def make(problem):
        batch = torch.Size() if shared else problem.batch
        kernel = ScaleKernel(RQKernel(ard_num_dims=2, batch_shape=batch), batch_shape=batch)
        kernel = kernel.to(problem.dtype)
        for parameter in kernel.parameters():
            parameter.data.add_(problem.leaf(*parameter.shape).detach(), alpha=0.3)
            problem.leaves[-1] = parameter
        x = problem.leaf(problem.n, 2)
        x.data[-1] = x.data[0]
        if one_noise:
            noise = HomoskedasticNoise(batch_shape=batch).to(problem.dtype)
            problem.leaves.append(noise.raw_noise)
            variances = noise.noise.expand(*batch, problem.n)
        else:
            noise = variances = problem.leaf(*batch, problem.n, positive=True)
        form = closed_form(kernel, select=True)
        covariance = GramCovariance(form, x, noise, torch.Size((*batch, problem.n, problem.n)))
        scaled = x / kernel.base_kernel.lengthscale
        squares = (scaled.unsqueeze(-2) - scaled.unsqueeze(-3)).square().sum(-1)
        alpha = kernel.base_kernel.alpha.unsqueeze(-1)
        matrix = kernel.outputscale[..., None, None] * (1 + squares / (2 * alpha)) ** -alpha
        return covariance, matrix + torch.diag_embed(variances)

    return make


def kronecker(rank, shared=False):
    """Tasks at the same points, whose covariance members of a batch may share."""

    def make(problem):
        count = problem.n // TASKS
        root = problem.leaf(*(() if shared else problem.batch), count, count)
        factor = problem.leaf(*problem.batch, TASKS, rank)
        noise = problem.leaf(*problem.batch, TASKS, positive=True)
        points, tasks = root @ root.mT, factor @ factor.mT
        matrix = torch.einsum("...ij,...kl->...ikjl", points, tasks)
        matrix = matrix.reshape(*problem.batch, problem.n, problem.n)
        return (
            KroneckerCovariance(points, tasks, noise),
            matrix + torch.diag_embed(noise.repeat(*[1] * len(problem.batch), count)),
        )

    return make


def iterative(problem):
    root = problem.leaf(*problem.batch, problem.n, problem.n)
    noise = problem.leaf(problem.n, positive=True)
    latent = root @ root.mT
    covariance = IterativeCovariance(to_linear_operator(latent), noise, TIGHT)
    return covariance, latent + problem.diagonal(noise)


KINDS = {
    "dense": dense,
    "low rank": low_rank(3),
    "of many features": low_rank(12),
    "kernel": gram(one_noise=True),
    "kernel and noises": gram(one_noise=False),
    "kernel of all members": gram(one_noise=True, shared=True),
    "tasks": kronecker(TASKS),
    "tasks of rank one": kronecker(1),
    "tasks at shared points": kronecker(TASKS, shared=True),
    "iterative": iterative,
}
SINGLES = ["dense", "low rank", "of many features", "kernel", "kernel and noises", "tasks",
           "tasks of rank one", "iterative"]  # fmt: skip
EXACT = ["dense", "low rank", "of many features", "kernel", "tasks"]
BLOCKS = {
    "singles": [torch.arange(N).unsqueeze(-1)],
    "rows of tasks": [torch.tensor([[6, 7], [0, 1]]), torch.tensor([[2, 3, 4, 5]])],
    "tasks that overlap": [torch.tensor([[0, 1, 6, 7], [2, 3, 6, 7]])],
    "partition": [torch.tensor([[3, 0], [5, 1], [2, 4], [7, 6]])],
    "sizes": [torch.tensor([[7, 0, 3, 1]]), torch.tensor([[2, 4], [6, 5]]), torch.tensor([[1]])],
    "overlap": [torch.tensor([[0, 1, 2], [2, 1, 5], [7, 2, 6]])],
    "point": [torch.tensor([[4]])],
    "few": [torch.tensor([[6, 1]])],  # few enough for triangular solves
    "most": [torch.tensor([[5, 0, 2, 3, 1, 6, 7]])],
    "all": [torch.arange(N).flip(0).unsqueeze(0)],
}
BATCHES = [((), (4,)), ((2,), (2,)), ((2, 3), (2, 3)), ((2, 1), (2, 3)), ((3,), ())]


def close(value, expected, tolerance=1e-9):
    atol = tolerance * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=atol)


def assert_same(problem, residual, value, expected):
    """Values, and gradients of their weighted sum."""
    is_iterative = isinstance(problem.covariance, IterativeCovariance)
    close(value, expected)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    leaves = [*problem.leaves, residual]
    ours, theirs = (
        torch.autograd.grad((weights * values).sum(), leaves, retain_graph=True)
        for values in (value, expected)
    )
    for gradient, other in zip(ours, theirs, strict=True):
        close(gradient, other, 1e-6 if is_iterative else 1e-8)


def explicit(matrix, residual, blocks):
    rows = [row for group in blocks for row in group]
    return torch.stack([reference.conditional_log_density(matrix, residual, row) for row in rows])


def blocks_of(kind):
    # Conjugate gradients leave a point to condition on.
    return [name for name in BLOCKS if (kind, name) != ("iterative", "all")]


CASES = [(kind, blocks) for kind in SINGLES for blocks in blocks_of(kind)]


@pytest.mark.parametrize(("kind", "blocks"), CASES)
def test_densities_and_gradients_are_those_of_explicit_conditionals(kind, blocks):
    problem, residual = Problem(kind), reference.random_residual(N).requires_grad_()
    values = problem.covariance.block_log_densities(residual, BLOCKS[blocks])
    expected = explicit(problem.matrix, residual, BLOCKS[blocks])
    assert_same(problem, residual, values, expected)
    total = Problem(kind)
    value = total.covariance.held_out_log_density(residual, BLOCKS[blocks])
    expected = explicit(total.matrix, residual, BLOCKS[blocks]).sum()
    assert_same(total, residual, value, expected)


MEMBERS = [  # each kind with each batch, and one kind of blocks in turn
    (kind, *batch, [b for b in blocks_of(kind) if b not in ("singles", "point")][(i + k) % 7])
    for i, kind in enumerate(KINDS)
    for k, batch in enumerate(BATCHES)
]


@pytest.mark.parametrize(("kind", "covariances", "residuals", "blocks"), MEMBERS)
def test_members_of_a_batch_are_as_alone(kind, covariances, residuals, blocks):
    """Also where a covariance is shared by several residuals, or a residual by covariances."""
    problem = Problem(kind, covariances)
    residual = reference.random_residual(N, residuals).requires_grad_()
    batch = torch.broadcast_shapes(problem.covariance.shape[:-2], residuals)
    value = problem.covariance.held_out_log_density(residual, BLOCKS[blocks])
    assert value.shape == batch
    members = zip(
        problem.matrix.expand(*batch, N, N).reshape(-1, N, N),
        residual.expand(*batch, N).reshape(-1, N),
        strict=True,
    )
    alone = [explicit(matrix, r, BLOCKS[blocks]).sum() for matrix, r in members]
    assert_same(problem, residual, value, torch.stack(alone).reshape(batch))


@pytest.mark.parametrize(("covariances", "b"), [((2, 3), 4), ((2, 1), N), ((), 1)])
@pytest.mark.parametrize("kind", ["dense", "low rank", "kernel", "kernel and noises"])
def test_members_with_held_out_points_of_their_own(kind, covariances, b):
    problem = Problem(kind, covariances)
    residual = reference.random_residual(N, (2, 3)).requires_grad_()
    rows = [torch.randperm(N, generator=problem.generator)[:b] for _ in range(6)]
    value = problem.covariance.conditional_log_density(residual, torch.stack(rows).view(2, 3, b))
    matrices = problem.matrix.expand(2, 3, N, N).reshape(6, N, N)
    members = zip(matrices, residual.flatten(0, 1), rows, strict=True)
    expected = torch.stack([reference.conditional_log_density(*member) for member in members])
    assert_same(problem, residual, value, expected.view(2, 3))


@pytest.mark.parametrize("kind", EXACT)
def test_learning_curves_and_predictions_from_earlier_points(kind):
    problem, residual = Problem(kind), reference.random_residual(N).requires_grad_()
    orders = torch.stack([torch.randperm(N, generator=problem.generator) for _ in range(3)])
    errors, variances = problem.covariance.predictions(residual, orders)
    terms = torch.distributions.Normal(0.0, variances.sqrt()).log_prob(errors)
    curves = problem.covariance.sequential(residual, orders)
    close(curves, terms)
    expected = torch.stack(
        [reference.sequential_log_densities(problem.matrix, residual, order) for order in orders]
    )
    assert_same(problem, residual, curves, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "low rank"])
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 3),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (2, 2)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(kind, n, k, share, batch, seed):
    problem = Problem(kind, batch, n=n, seed=seed)
    residual = reference.random_residual(n, batch, seed).requires_grad_()
    b = max(1, round(share * n))
    orders = torch.stack([torch.randperm(n, generator=problem.generator) for _ in range(k)])
    blocks = orders[:, n - b :]
    values = problem.covariance.block_log_densities(residual, [blocks])
    tails = problem.covariance.sequential(residual, orders)[..., n - b :].sum(-1)
    members = zip(problem.matrix.reshape(-1, n, n), residual.reshape(-1, n), strict=True)
    expected = torch.stack([explicit(K, r, [blocks]) for K, r in members]).reshape(*batch, k)
    close(tails, expected, 1e-8)
    assert_same(problem, residual, values, expected)


@pytest.mark.parametrize("blocks", ["rows of tasks", "sizes", "most"])
@pytest.mark.parametrize("kind", SINGLES)
def test_float32_is_close_to_float64(kind, blocks):
    results = []
    for dtype in (torch.float64, torch.float32):
        problem = Problem(kind, dtype=dtype)
        if dtype == torch.float32 and kind == "iterative":
            problem.covariance.settings = ConjugateGradients(1e-5, max_error=None)
        residual = reference.random_residual(N).float().to(dtype).requires_grad_()
        value = problem.covariance.held_out_log_density(residual, BLOCKS[blocks])
        results.append([value, *torch.autograd.grad(value, [*problem.leaves, residual])])
    for double, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        close(single.double(), double, 1e-3)


@pytest.mark.parametrize("kind", ["dense", "low rank", "iterative"])
@pytest.mark.parametrize("missing", [False, True])
def test_predictions_of_other_values(kind, missing):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(N, generator=generator, dtype=torch.float64)
    cross = features @ torch.randn(3, 4, generator=generator, dtype=torch.float64)
    residual, gone, seen = reference.random_residual(N), None, torch.arange(N)
    if missing:
        gone = torch.zeros(N, dtype=torch.bool)
        gone[[2, 5]] = True
        seen = (~gone).nonzero().squeeze(-1)
        residual = residual.masked_fill(gone, 0.0)
        features, noise = features.masked_fill(gone[:, None], 0.0), noise.masked_fill(gone, 1.0)
    latent = features @ features.mT
    covariance = {
        "dense": lambda: DenseCovariance(latent + noise.diag()),
        "low rank": lambda: LowRankPlusDiagonal(features, noise),
        "iterative": lambda: IterativeCovariance(to_linear_operator(latent), noise, TIGHT),
    }[kind]()
    block = covariance.predictor(residual, gone).given(cross, keep=True)
    K = (latent + noise.diag())[seen][:, seen]
    gain = torch.linalg.solve(K, cross[seen]).mT
    close(block.shift, gain @ residual[seen])
    close(block.reduction, (gain @ cross[seen]).diagonal())
    close(block.joint_reduction(block), gain @ cross[seen])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_entries_and_members(kind):
    problem = Problem(kind, (2,))
    covariance, matrix = problem.covariance, problem.matrix
    assert (covariance.shape, covariance.dtype) == (matrix.shape, matrix.dtype)
    close(covariance.to_dense(), matrix)
    rows = torch.tensor([4, 0, 7])
    close(covariance.diagonal(), matrix.diagonal(dim1=-2, dim2=-1))
    close(covariance.take(rows).to_dense(), matrix[:, rows][:, :, rows])
    close(covariance[1].to_dense(), matrix[1])
    close(covariance[1:].to_dense(), matrix[1:])
    # Of a dense covariance an estimate in another norm, of low rank a bound of the eigenvalues.
    condition = float(torch.linalg.cond(matrix[0]))
    assert condition / N <= covariance[0].condition_number() <= N * condition
    residual = reference.random_residual(N)
    mean, variance = covariance.leave_one_out(residual, rows)
    for member, i in itertools.product(range(2), range(len(rows))):
        expected = reference.conditional_moments(matrix[member], residual, rows[i].unsqueeze(0))
        close(mean[member, i], expected[0].squeeze())
        close(variance[member, i], expected[1].squeeze())
