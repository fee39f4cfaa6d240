"""Examples of what takes or makes networks: their evidences, curvatures, kernels."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import RBFKernel, SpectralMixtureKernel
from gpytorch.likelihoods import GaussianLikelihood

from benchmarks.robustness.fuzz.building_blocks import (
    classes,
    classifier,
    covariance,
    generator,
    gp,
    inputs,
    labels,
    mlp,
    normal,
    positive,
    regressor,
    targets,
    train,
)
from benchmarks.robustness.fuzz.examples import example
from gpclml.curvature import DiagonalCurvature, Full, GaussianWeightPrior
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.models import LinearizedNetwork


@example("models.LinearizedGP")
def _() -> dict[str, Any]:
    network = LinearizedNetwork(mlp())
    return train(likelihood=GaussianLikelihood().double(), network=network)


@example("models.LinearizedNetwork")
def _() -> dict[str, Any]:
    network = mlp()
    return {"network": network, "prior": GaussianWeightPrior(network)}


@example("models.LinearizedNetwork.forward")
def _() -> dict[str, Any]:
    return {"self": LinearizedNetwork(mlp()), "x": inputs()}


@example("models.find_networks")
def _() -> dict[str, Any]:
    return {"model": gp("deep")}


@example("kernels.networks.MLP")
def _() -> dict[str, Any]:
    return {"sizes": [2, 3, 1], "generator": generator(), "dtype": torch.float64}


@example("kernels.networks.StackedNetwork")
def _() -> dict[str, Any]:
    return {"networks": [mlp(), mlp()]}


@example("kernels.networks.apply_network")
def _() -> dict[str, Any]:
    return {"network": mlp(), "x": inputs()}


@example("kernels.networks.check_finite_output")
def _() -> dict[str, Any]:
    return {"output": normal(3, 2)}


@example("kernels.networks.reset_network")
def _() -> dict[str, Any]:
    return {"network": mlp(), "generator": generator()}


@example("mlls.LaplaceMarginalLogLikelihood")
def _() -> dict[str, Any]:
    return {
        "likelihood": classes(), "model": LinearizedNetwork(mlp(3)), "num_data": 8,
        "curvature": Full(),
    }  # fmt: skip


@example("mlls.LaplaceMarginalLogLikelihood.forward")
def _() -> dict[str, Any]:
    mll = classifier()
    return {"self": mll, "output": mll.model(inputs()), "target": labels()}


@example("mlls.LaplaceMarginalLogLikelihood.log_joint")
def _() -> dict[str, Any]:
    mll = regressor()
    return {"self": mll, "output": mll.model(inputs()), "target": targets()}


@example("mlls.LaplaceEvidence")
def _() -> dict[str, Any]:
    names = {name: p.detach() ** 2 for name, p in mlp(3).named_parameters()}
    return {
        "mll": classifier(), "mean": normal(8, 3), "target": labels(),
        "curvature": DiagonalCurvature(names),
    }  # fmt: skip


@example("curvature.BlockDiagonal")
def _() -> dict[str, Any]:
    return {}


@example("curvature.Full")
def _() -> dict[str, Any]:
    return {}


@example("curvature.Kronecker")
def _() -> dict[str, Any]:
    return {}


@example("curvature.DenseCurvature")
def _() -> dict[str, Any]:
    return {"blocks": []}


@example("curvature.DiagonalCurvature")
def _() -> dict[str, Any]:
    return {"diagonal": {"w": positive(3)}}


@example("curvature.FunctionSpaceCurvature")
def _() -> dict[str, Any]:
    return {"grams": {"w": covariance(4)}}


@example("curvature.KroneckerCurvature")
def _() -> dict[str, Any]:
    return {"factors": []}


@example("curvature.GaussianWeightPrior")
def _() -> dict[str, Any]:
    return {"network": mlp()}


def _columns(outputs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(outputs).unsqueeze(-1)


@example("curvature.sample_gradients")
def _() -> dict[str, Any]:
    return {"module": mlp(), "x": inputs(), "cotangents": _columns}


@example("kernels.FourierFeatures", sizes=["num_frequencies"])
def _() -> dict[str, Any]:
    return {"num_frequencies": 3}


@example("kernels.FourierFeatures.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import FourierFeatures

    return {"self": FourierFeatures(3), "x": inputs(8, 1)}


@example("kernels.IdentityFeatures")
def _() -> dict[str, Any]:
    return {}


@example("kernels.PolynomialFeatures", sizes=["degree"])
def _() -> dict[str, Any]:
    return {"degree": 2}


@example("kernels.PolynomialFeatures.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import PolynomialFeatures

    return {"self": PolynomialFeatures(2), "x": inputs()}


@example("kernels.PrefixFeatures")
def _() -> dict[str, Any]:
    return {"num_features": 1}


@example("kernels.PrefixFeatures.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import PrefixFeatures

    return {"self": PrefixFeatures(1), "x": inputs()}


@example("kernels.RandomFourierFeatures", sizes=["num_inputs", "num_features"])
def _() -> dict[str, Any]:
    return {"num_inputs": 2, "num_features": 3, "weight": normal(3, 2), "bias": normal(3)}


@example("kernels.RandomFourierFeatures.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import RandomFourierFeatures

    return {"self": RandomFourierFeatures(2, 3).double(), "x": inputs()}


@example("curvature.invariances.AffineAugmentation", sizes=["samples"])
def _() -> dict[str, Any]:
    return {"ranges": {"rotation": 0.1, "scale": 0.2}, "samples": 2}


@example("curvature.invariances.AffineAugmentation.forward")
def _() -> dict[str, Any]:
    from gpclml.curvature.invariances import AffineAugmentation

    return {"self": AffineAugmentation({"rotation": 0.1}, 2), "x": torch.rand(3, 1, 4, 4)}


@example("curvature.invariances.AveragedNetwork")
def _() -> dict[str, Any]:
    return {"network": mlp()}


@example("kernels.CosineSimilarityKernel")
def _() -> dict[str, Any]:
    return {}


@example("kernels.DeepKernel")
def _() -> dict[str, Any]:
    return {"feature_extractor": mlp(2), "base_kernel": RBFKernel()}


@example("kernels.DeepKernel.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import DeepKernel

    kernel = DeepKernel(mlp(2), RBFKernel().double())
    return {"self": kernel, "x1": inputs(), "x2": inputs(3)}


@example("kernels.FeatureKernel")
def _() -> dict[str, Any]:
    return {"features": mlp(3), "prior_variance": positive(3)}


@example("kernels.JointSpectralMixtureKernel", sizes=["num_mixtures", "ard_num_dims"])
def _() -> dict[str, Any]:
    return {"num_mixtures": 2, "ard_num_dims": 2, "generator": generator()}


@example("kernels.NeuralTangentKernel")
def _() -> dict[str, Any]:
    network = mlp()
    return {"network": network, "prior": GaussianWeightPrior(network)}


@example("kernels.SkipFeatures")
def _() -> dict[str, Any]:
    return {"sizes": [2, 3, 1], "generator": generator()}


@example("kernels.initialize_spectral_mixture")
def _() -> dict[str, Any]:
    kernel = SpectralMixtureKernel(2, ard_num_dims=2).double()
    return {"kernel": kernel, "generator": generator()} | train()


@example("kernels.LinearizedMean")
def _() -> dict[str, Any]:
    return {"network": mlp()}


@example("kernels.NetworkMean")
def _() -> dict[str, Any]:
    return {"network": mlp()}


@example("kernels.NetworkMean.forward")
def _() -> dict[str, Any]:
    from gpclml.kernels import NetworkMean

    return {"self": NetworkMean(mlp()), "x": inputs()}


@example("curvature.output_likelihoods.output_likelihood")
def _() -> dict[str, Any]:
    return {"likelihood": classes()}


@example("curvature.output_likelihoods.gradient_columns")
def _() -> dict[str, Any]:
    return {"likelihood": output_likelihood(classes()), "outputs": normal(8, 3), "target": labels()}


@example("curvature.output_likelihoods.output_column")
def _() -> dict[str, Any]:
    return {"columns": normal(8, 3, 3), "place": 1}
