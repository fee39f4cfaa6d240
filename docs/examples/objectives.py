import torch
from sklearn.datasets import load_diabetes

from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

x, y = (torch.tensor(part[:150]) for part in load_diabetes(return_X_y=True, scaled=False))
model = GPRegression(x, y, kernel="rbf")
lml = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
fit_mll(lml, progress=False)
model.train()
for conditioning in (LastPoints(m=0), KFold(10, seed=0), LeaveOneOut(), RandomHoldout(0.1, seed=0)):
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    value = mll(model(x), model.train_targets).item()
    print(f"{type(conditioning).__name__:13} {value:.3f} nats a held-out point")
