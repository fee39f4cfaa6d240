"""The linear models among which Lyle et al. (2020) choose: priors, frequencies, features."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.data import has_files, load_images
from gpclml.errors import UnknownNameError
from gpclml.evidence.training_speed import expected_terms, predict_prefixes, single_target_data
from gpclml.kernels import RandomFourierFeatures
from gpclml.models import BayesianLinearModel

__all__ = ["PROBLEMS", "expected_curves", "image_source", "linear_models"]

PROBLEMS = {
    "variance": "prior variance",
    "frequency": "lengthscale / median distance",
    "features": "number of features",
    "features, one prior": "number of features",
    "features, five": "number of features, five informative",
}
"""Name of a problem to what its models differ in."""

_VARIANCES = tuple(4.0**-power for power in range(10))
_LENGTHSCALES = tuple(2.0**power for power in range(-3, 6))
_NUM_FEATURES = (5, 10, 15, 20, 25, 30)
_INFORMATIVE, _FEW = 15, 5
_NOISE = 0.1


def image_source() -> str:
    """Images for the frequencies: ``"mnist-test"`` if the data folder has them, or ``"digits"``.

    Digits ship with scikit-learn, so that this runs everywhere.
    """
    return "mnist-test" if has_files("mnist-test") else "digits"


def expected_curves(model: BayesianLinearModel, orders: Tensor) -> Tensor:
    """Terms of the lower bound L(D) of Lyle et al. (2020), for each order, ``(k, n)``."""
    data, noise = single_target_data(model)
    return expected_terms(predict_prefixes(data.covariance, data.residual, noise, orders))


def linear_models(
    problem: str, seed: int, num_points: int, data: str = "digits"
) -> dict[float, BayesianLinearModel]:
    r"""Models of the same targets by what they differ in.

    Drawn data are as in the authors' scripts: y is standard
    normal, an informative feature is y plus a standard normal, any other a standard normal.

    - ``"variance"``: 25 informative features, noise .1, prior variances 1 to 4⁻⁹;
    - ``"frequency"``: 300 random Fourier features of images of two classes, 0 and 1, whose
      targets are -1 and 1; noise .1, and lengthscales 1/8 to 32 times the median distance;
    - ``"features"``: the first 5 to 30 of 30 features, 15 informative ones first; noise
      1/15, and prior variance 1/k² of k features;
    - ``"features, one prior"``: the same with prior variance 1/225 for all;
    - ``"features, five"``: as ``"features"``, of which five are informative; noise 1/5.

    Args:
        problem: One of :data:`PROBLEMS`.
        seed: Of data and frequencies.
        num_points: Number of points.
        data: Images, ``"digits"`` or ``"mnist-test"``.

    Raises:
        UnknownNameError: No such problem.
    """
    if problem not in PROBLEMS:
        raise UnknownNameError("problem", problem, PROBLEMS)
    generator = torch.Generator().manual_seed(seed)
    if problem == "frequency":
        return _frequency_models(*_two_digits(data, num_points, generator), seed)
    return _column_models(problem, num_points, generator)


def _column_models(
    problem: str, num_points: int, generator: torch.Generator
) -> dict[float, BayesianLinearModel]:
    columns, informative = (25, 25) if problem == "variance" else (30, _INFORMATIVE)
    if problem == "features, five":
        informative = _FEW
    y = torch.randn(num_points, generator=generator, dtype=torch.float64)
    x = torch.randn(num_points, columns, generator=generator, dtype=torch.float64)
    x[:, :informative] += y.unsqueeze(-1)
    if problem == "variance":
        return {
            variance: BayesianLinearModel(x, y, prior_variance=variance, noise=_NOISE)
            for variance in _VARIANCES
        }
    noise, same_prior = 1 / informative, problem == "features, one prior"
    return {
        k: BayesianLinearModel(
            x[:, :k], y, prior_variance=1 / (_INFORMATIVE if same_prior else k) ** 2, noise=noise
        )
        for k in _NUM_FEATURES
    }


def _frequency_models(x: Tensor, y: Tensor, seed: int) -> dict[float, BayesianLinearModel]:
    distance = float(torch.pdist(x).median())
    generator = torch.Generator().manual_seed(1000 + seed)
    weight = torch.randn(300, x.shape[-1], generator=generator, dtype=torch.float64)
    bias = 2 * torch.pi * torch.rand(300, generator=generator, dtype=torch.float64)
    models = {}
    for scale in _LENGTHSCALES:
        features = RandomFourierFeatures(
            x.shape[-1], 300, lengthscale=scale * distance, weight=weight, bias=bias
        )
        models[scale] = BayesianLinearModel(x, y, features, noise=_NOISE)
    return models


def _two_digits(data: str, num_points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of zeros and ones in random order, with pixels in [0, 1]."""
    images = load_images(data)
    rows = (images.labels < 2).nonzero().squeeze(-1)
    rows = rows[torch.randperm(len(rows), generator=generator)[:num_points]]
    return images.images[rows].flatten(1).double() / 255, 2.0 * images.labels[rows].double() - 1
