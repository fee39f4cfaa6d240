"""Valid arguments of public callables: a table by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gpytorch
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, SpectralMixtureKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, LikelihoodList
from matplotlib.figure import Figure

import gpclml
from benchmarks.robustness.fuzz.objects import (
    Arguments,
    class_tasks,
    classes,
    classifier,
    compared,
    draws,
    episodes,
    generator,
    gp,
    here,
    images,
    inputs,
    labels,
    laplace,
    linear_model,
    mlp,
    normal,
    objective,
    orders,
    positive,
    posterior,
    stack,
    targets,
    tasks,
    train,
    transfer,
)
from gpclml.conditioning import KFold, RandomHoldout
from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.evaluation import score_models
from gpclml.evidence.sampling import sampled_outputs
from gpclml.inference import IterativePosterior
from gpclml.kernels import (
    DeepKernel,
    FourierFeatures,
    NetworkMean,
    PolynomialFeatures,
    RandomFourierFeatures,
)
from gpclml.laplace import Laplace
from gpclml.likelihoods import TargetMixture
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import LinearizedNetwork, Standardizer
from gpclml.tables import StackedGP

# fmt: off
CALLS: Mapping[str, Callable] = {
    "conditioning.HeldOut": lambda blocks: gpclml.conditioning.HeldOut(
        *(blocks if isinstance(blocks, (list, tuple)) else [blocks])),
    "fit.fit_map.regression": gpclml.fit.fit_map,
}
"""What is called where it is not the object of that name."""

ARGUMENTS: Mapping[str | tuple[str, ...], Callable[[], Arguments]] = {
    (
        "conditioning.LeaveOneOut", "curvature.BlockDiagonal", "curvature.Full",
        "curvature.Kronecker", "curvature.LowRank", "evidence.training_speed.SumOfTrainingLosses",
        "kernels.CosineSimilarityKernel", "linalg.ConjugateGradients",
        "linalg.gaussians.LowRankFamily",
    ): dict,
    "conditioning.HeldOut": lambda: dict(
        blocks=(here(torch.tensor([0, 2])), here(torch.tensor([5])))),
    "conditioning.KFold": lambda: dict(n_splits=3, seed=0),
    "conditioning.LastPoints": lambda: dict(m=2),
    "conditioning.NearestNeighbors": lambda: dict(k=2, batch=3, refresh=2, seed=0),
    "conditioning.RandomHoldout": lambda: dict(fraction=0.2, seed=0, condition_on=3),
    "conditioning.RandomHoldout.split": lambda: dict(
        self=RandomHoldout(0.2), num_data=8, generator=generator(), observed=None),
    "conditioning.RandomOrderings": lambda: dict(k=2, m=3, seed=0),
    "conditioning.as_orders": lambda: dict(
        orderings=orders(), n=8, generator=generator()),
    "conditioning.partition_by_class": lambda: dict(
        labels=labels(), batch_size=2, generator=generator()),
    "conditioning.partition_at_random": lambda: dict(
        num_data=8, batch_size=3, generator=generator()),
    (
        "curvature.GaussianWeightPrior", "kernels.LinearizedMean", "kernels.NetworkMean",
    ): lambda: dict(network=mlp()),
    "curvature.Subnetwork": lambda: dict(indices={"0.weight": here(torch.tensor([0, 2]))}),
    "curvature.output_likelihoods.output_likelihood": lambda: dict(likelihood=classes()),
    "laplace.Laplace": lambda: dict(network=mlp(3), likelihood=classes()),
    "laplace.Laplace.fit": lambda: dict(
        self=Laplace(mlp(3), classes()), data=(inputs(), labels()),
        validation=(inputs(), labels()), progress=False),
    ("laplace.Laplace.output_distribution", "laplace.Laplace.predict"): lambda: dict(
        self=posterior(), x=inputs(3)),
    "laplace.Laplace.log_marginal_likelihood": lambda: dict(
        self=posterior(), prior_precision=positive(())),
    "laplace.Laplace.output_covariance": lambda: dict(
        self=posterior(), x=inputs(3), other=inputs(2)),
    "laplace.Laplace.sample_outputs": lambda: dict(self=posterior(), x=inputs(3), count=2),
    "laplace.Laplace.largest_variances": lambda: dict(
        self=Laplace(mlp(3), classes(), structure="diag").fit((inputs(), labels())), count=2),
    "laplace.Laplace.sample_weights": lambda: dict(self=posterior(), count=2),
    "tables.Classifier": lambda: dict(kernels=("rbf",)),
    "tables.Regressor": lambda: dict(candidates=("linear",)),
    "tables.StackedGP": lambda: dict(candidates=("linear",)),
    "tables.StackedGP.fit": lambda: dict(
        self=StackedGP(("linear",)), x=inputs(), y=targets(), progress=False),
    "tables.StackedGP.predict": lambda: dict(self=stack(), x=inputs(3)),
    "tables.StackedPrediction": lambda: dict(
        weights=here(torch.tensor([0.5, 0.5])), locations=normal(2, 3), scales=positive(2, 3),
        degrees=here(torch.tensor([5.0, torch.inf]))),
    "tables.StackedPrediction.quantile": lambda: dict(
        self=stack().predict(inputs(3)), probability=[0.1, 0.9]),
    "tables.StackedPrediction.sample": lambda: dict(self=stack().predict(inputs(3)), count=2),
    "tables.fit_calibration": lambda: dict(residuals=normal(9)),
    "evaluation.calibration.expected_calibration_error": lambda: dict(
        probabilities=normal(8, 3).softmax(-1), labels=labels()),
    "evaluation.calibration.fit_temperature": lambda: dict(
        outputs=normal(2, 8, 3), labels=labels()),
    ("evaluation.compare", "evaluation.score_models"): compared,
    "evaluation.decompose": lambda: dict(
        model=gp(RBFKernel() + LinearKernel()), x=inputs(3), names=["a", "b"]),
    "evaluation.conditional_log_marginal_likelihood": lambda: dict(
        model=gp(), conditioning=KFold(2)),
    ("evaluation.joint_log_predictive", "evaluation.marginal_log_predictive"): lambda: dict(
        model=gp(), x=inputs(3), y=targets()[:3]),
    "evaluation.learning_curve": lambda: dict(model=gp(), orderings=orders()),
    ("evaluation.leave_one_out", "evaluation.log_marginal_likelihood"): lambda: dict(model=gp()),
    "evaluation.paired_difference": lambda: dict(terms=normal(8), reference=normal(8, seed=1)),
    "evaluation.plot_compare": lambda: dict(
        comparison=score_models(**compared()), ax=Figure().subplots()),
    (
        "evaluation.plot_calibration", "evaluation.plot_fit", "evaluation.plot_learning_curves",
    ): lambda: dict(
        comparison=score_models(**compared()), ax=Figure().subplots(2)),
    "evaluation.stacking_weights": lambda: dict(log_densities=normal(8, 3)),
    "evidence.bounds.mcallester_bound": lambda: dict(
        empirical_risk=positive(3) / 4, kl=positive(3), num_data=50, loss_range=(0.0, 1.0)),
    "evidence.bounds.evidence_bound": lambda: dict(
        log_evidence=-positive(3), num_data=50, m=10, loss_range=(-1.0, 4.0)),
    ("evidence.criteria.psis_loo", "evidence.criteria.waic"): lambda: dict(
        log_likelihoods=normal(40, 5)),
    "evidence.sampling.estimate_conditional_log_density": lambda: dict(
        likelihood=classes(), outputs_of=lambda weights, x: sampled_outputs(mlp(3), weights, x),
        weights=draws(), held_out=(inputs(), labels()), scaling=(inputs(5), labels(5))),
    (
        "evidence.sampling.joint_log_density", "evidence.sampling.marginal_log_densities",
    ): lambda: dict(
        likelihood=classes(), outputs=normal(4, 8, 3), target=labels()),
    ("evidence.sampling.linearized_outputs", "evidence.sampling.sampled_outputs"): lambda: dict(
        network=mlp(3), weights=draws(), x=inputs()),
    "evidence.sampling.laplace_conditional_log_density": lambda: dict(
        evidence=laplace(3).evidence_of(inputs(), labels()), held_out=(inputs(4), labels()[:4])),
    "evidence.sampling.log_mean": lambda: dict(log_values=normal(8)),
    "evidence.sampling.rescaled": lambda: dict(
        weights={"w": normal(4, 3)}, scale=0.5, center={"w": normal(3)}),
    "evidence.sampling.sample_sgld": lambda: train(
        mll=laplace(), count=2, epochs=4, batch_size=4),
    "kernels.networks.StackedNetwork": lambda: dict(
        networks=[mlp(), mlp()]),
    "evidence.training_speed.training_speed": lambda: dict(
        model=gp(), orderings=orders(), repeats=1, num_samples=2),
    "fit.warm_start": lambda: dict(model=gp("deep")),
    "fit.suggest_batch_size": lambda: dict(num_data=50),
    "fit.fit_batch": lambda: dict(mlls=[objective(), objective()], steps=2),
    "fit.fit_gpytorch_mll_fused": lambda: dict(mll=objective().train(), options={"maxiter": 2}),
    "fit.fit_hyperparameters": lambda: train(mll=laplace(), steps=2, batch_size=4),
    "fit.fit_map": lambda: dict(
        mll=laplace(3), epochs=2, batch_size=4, train_x=inputs(), train_y=labels()),
    "fit.fit_map.regression": lambda: train(mll=laplace(), epochs=2, batch_size=4),
    "fit.fit_mll": lambda: dict(mll=objective(), steps=2, optimizer="adam"),
    "fit.fit_networks": lambda: dict(mll=objective(gp("deep_bottleneck")), steps=2),
    "fit.fit_online": lambda: dict(
        mll=laplace(3), train_x=inputs(), train_y=labels(), epochs=2, batch_size=4,
        hyper_steps=1, burn_in=0),
    "inference.IterativePosterior": lambda: dict(model=gp(), solver=ConjugateGradients()),
    "inference.IterativePosterior.mean": lambda: dict(self=IterativePosterior(gp()), x=inputs(3)),
    "inference.IterativePosterior.sample": lambda: dict(
        self=IterativePosterior(gp()), x=inputs(3), generator=generator()),
    "kernels.DeepKernel": lambda: dict(feature_extractor=mlp(2), base_kernel=RBFKernel()),
    "kernels.DeepKernel.forward": lambda: dict(
        self=DeepKernel(mlp(2), here(RBFKernel())), x1=inputs(), x2=inputs(3)),
    "kernels.FeatureKernel": lambda: dict(features=mlp(3), prior_variance=positive(3)),
    "kernels.FourierFeatures": lambda: dict(num_frequencies=3),
    "kernels.FourierFeatures.forward": lambda: dict(self=here(FourierFeatures(3)), x=inputs(8, 1)),
    "kernels.JointSpectralMixtureKernel": lambda: dict(
        num_mixtures=2, ard_num_dims=2, generator=generator()),
    "kernels.NetworkMean.forward": lambda: dict(self=NetworkMean(mlp()), x=inputs()),
    ("kernels.NeuralTangentKernel", "models.LinearizedNetwork"): lambda: dict(
        network=(network := mlp()), prior=GaussianWeightPrior(network)),
    "kernels.PolynomialFeatures": lambda: dict(degree=2),
    "kernels.PolynomialFeatures.forward": lambda: dict(
        self=here(PolynomialFeatures(2)), x=inputs()),
    "kernels.RandomFourierFeatures": lambda: dict(
        num_inputs=2, num_features=3, weight=normal(3, 2), bias=normal(3)),
    "kernels.RandomFourierFeatures.forward": lambda: dict(
        self=here(RandomFourierFeatures(2, 3)), x=inputs()),
    "kernels.SkipFeatures": lambda: dict(sizes=[2, 3, 1], generator=generator()),
    "kernels.initialize_spectral_mixture": lambda: dict(
        kernel=here(SpectralMixtureKernel(2, ard_num_dims=2)), generator=generator()) | train(),
    "kernels.networks.MLP": lambda: dict(
        sizes=[2, 3, 1], generator=generator(), dtype=torch.float64),
    "kernels.networks.apply_network": lambda: dict(network=mlp(), x=inputs()),
    "kernels.networks.reset_network": lambda: dict(network=mlp(), generator=generator()),
    "meta.Conv4": lambda: dict(channels=1, width=2, generator=generator()),
    "meta.ConvBlocks": lambda: dict(blocks=1, channels=1, width=2, generator=generator()),
    "meta.DatasetTasks": lambda: dict(
        dataset=[(inputs(3), normal(3), inputs(4), normal(4)) for _ in range(3)], ways=0),
    "meta.DeepKernelTransfer": lambda: dict(backbone=mlp(), kernel="rbf", num_features=2),
    "meta.DeepKernelTransfer.objective": lambda: dict(
        self=(model := transfer()), mll=objective(model), episodes=episodes()),
    "meta.DeepKernelTransfer.predict": lambda: dict(
        self=transfer(), episodes=episodes()),
    "meta.Episodes": lambda: dict(
        support_x=normal(2, 3, 1), support_y=normal(2, 3), query_x=normal(2, 4, 1),
        query_y=normal(2, 4), ways=0),
    "meta.ImageTasks": lambda: dict(
        images=images(12, 1, 3, 3), labels=labels(12), ways=2, shots=1, queries=2),
    "meta.PeriodicTasks": lambda: dict(support=3, queries=4),
    "meta.class_probabilities": lambda: dict(
        predictive=torch.distributions.Normal(normal(2, 3, 4), positive(2, 3, 4))),
    "meta.evaluate_tasks": lambda: dict(model=transfer(), tasks=tasks(), count=2),
    "meta.fit_task_temperature": lambda: dict(
        model=class_tasks()[0], tasks=class_tasks()[1], count=2),
    "meta.train_on_tasks": lambda: dict(
        model=(model := transfer()), mll=objective(model), tasks=tasks(), steps=2,
        tasks_per_step=2, optimizer="adam"),
    "mlls.ConditionalMarginalLogLikelihood": lambda: dict(
        likelihood=(model := gp()).likelihood, model=model, conditioning=RandomHoldout(0.2)),
    "likelihoods.LogNegativeBinomialLikelihood": dict,
    "likelihoods.LogPoissonLikelihood": dict,
    "likelihoods.HeteroscedasticGaussianLikelihood": dict,
    "likelihoods.LogisticLikelihood": dict,
    "likelihoods.TargetDensity": lambda: dict(likelihood=here(BernoulliLikelihood())),
    "likelihoods.TargetPrediction": lambda: dict(
        likelihood=here(BernoulliLikelihood()), mean=normal(3), variance=positive(3)),
    "likelihoods.TargetMixture": lambda: dict(members=[classifier().predict(inputs(3))]),
    ("likelihoods.TargetMixture.interval", "likelihoods.TargetMixture.sample"): lambda: dict(
        self=TargetMixture([classifier().predict(inputs(3))])),
    "likelihoods.target_density": lambda: dict(likelihood=here(BernoulliLikelihood())),
    "mlls.ConditionalMarginalLogLikelihood.forward": lambda: dict(
        self=(mll := objective()), function_dist=mll.model(inputs()),
        target=mll.model.train_targets),
    ("mlls.ExactMarginalLogLikelihood", "mlls.LeaveOneOutPseudoLikelihood"): lambda: dict(
        likelihood=(model := gp()).likelihood, model=model),
    "mlls.LaplaceEvidence": lambda: dict(
        mll=(evidence := laplace(3).evidence_of(inputs(), labels())).mll, mean=normal(8, 3),
        target=labels(), curvature=evidence.curvature),
    "mlls.LaplaceMarginalLogLikelihood": lambda: dict(
        likelihood=classes(), model=LinearizedNetwork(mlp(3)), num_data=8, curvature=Full()),
    "mlls.LaplaceMarginalLogLikelihood.forward": lambda: dict(
        self=(mll := laplace(3)), output=mll.model(inputs()), target=labels()),
    "mlls.LaplaceMarginalLogLikelihood.log_joint": lambda: dict(
        self=(mll := laplace()), output=mll.model(inputs()), target=targets()),
    "mlls.LinearEvidenceLowerBound": lambda: dict(
        likelihood=(model := linear_model()).likelihood, model=model),
    "mlls.SumMarginalLogLikelihood": lambda: dict(
        likelihood=LikelihoodList((a := gp()).likelihood, (b := gp()).likelihood),
        model=gpytorch.models.IndependentModelList(a, b),
        mll_cls=ConditionalMarginalLogLikelihood),
    "models.BayesianLinearModel": lambda: train(prior_variance=positive(2), noise=0.1),
    "models.BayesianLinearModel.predict": lambda: dict(self=linear_model(), x=inputs(3)),
    "models.GPClassification": lambda: dict(
        train_x=inputs(), train_y=labels(ways=2), kernel="rbf", hidden=(3,)),
    "models.GPCounts": lambda: dict(
        train_x=inputs(), train_y=labels(), kernel="rbf", hidden=(3,), offset=targets()),
    "models.LatentGP": lambda: dict(
        train_inputs=inputs(), train_targets=labels(ways=2).double(),
        likelihood=here(BernoulliLikelihood())),
    "models.LatentGP.predict": lambda: dict(self=classifier(), x=inputs(3)),
    "models.GPRegression": lambda: train(hidden=(3,), warm_start=False),
    "models.GPRegression.check_targets": lambda: dict(
        self=gp(), target=gp().train_targets.clone()),
    "models.GPRegression.load": lambda: dict(path="no such model.pt"),
    "models.GPRegression.predict": lambda: dict(
        self=gp(), x=inputs(3), solver=ConjugateGradients()),
    "models.GPRegression.with_kernel": lambda: dict(self=gp(), kernel="matern"),
    "models.Linearization": lambda: dict(points=normal(4, 2), mean=normal(4, 1)),
    "models.LinearizedGP": lambda: train(
        likelihood=here(GaussianLikelihood()), network=LinearizedNetwork(mlp())),
    "models.LinearizedNetwork.forward": lambda: dict(self=LinearizedNetwork(mlp()), x=inputs()),
    "models.Standardizer": lambda: dict(offset=normal(1, 2), scale=positive(1, 2)),
    "models.Standardizer.fit": lambda: dict(values=inputs(), dim=-2),
    "models.Standardizer.transform": lambda: dict(
        self=Standardizer(normal(1, 2), positive(1, 2)), values=inputs()),
    "models.botorch.DeepKernelGP": lambda: dict(
        train_X=inputs().sigmoid(), train_Y=(y := targets().unsqueeze(-1)),
        train_Yvar=0.01 * y.square() + 0.01, hidden=(3,)),
    "models.find_networks": lambda: dict(model=gp("deep")),}
"""What makes valid arguments, by ``module.name`` or ``module.Class.method`` below ``gpclml``."""
