import torch
from sklearn.datasets import load_breast_cancer

from gpclml import GPClassification, LaplaceMarginalLogLikelihood, fit_mll, score_models

x, y = load_breast_cancer(return_X_y=True)
train, test = slice(0, 150), slice(150, None)
models = {}
for kernel in ("rbf", "matern"):
    models[kernel] = GPClassification(x[train], y[train], kernel, ard=False)
    fit_mll(LaplaceMarginalLogLikelihood(models[kernel].likelihood, models[kernel]))

prediction = models["rbf"].predict(x[test])
right = (prediction.probabilities > 0.5) == torch.as_tensor(y[test] == 1)
print(f"right: {right.double().mean():.3f}, log loss: {-prediction.log_prob(y[test]).mean():.3f}")
print(score_models(models, orderings=50).table[["lml", "clml", "loo"]].round(1).to_string())
