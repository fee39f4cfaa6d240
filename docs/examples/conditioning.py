import torch
from sklearn.datasets import load_diabetes

from gpclml.conditioning import RandomHoldout, RandomOrderings
from gpclml.evaluation import conditional_log_marginal_likelihood
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

x, y = (torch.tensor(part[:100]) for part in load_diabetes(return_X_y=True, scaled=False))
model = GPRegression(x, y)


def three_values(conditioning):
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    return [round(mll(model(x), model.train_targets).item(), 3) for _ in range(3)]


print("redrawn, values that differ:", len(set(three_values(RandomHoldout(0.1)))))
print("with a seed:", three_values(RandomHoldout(0.1, seed=0)))
orderings = RandomOrderings(k=200, m=90, seed=0)
clml = conditional_log_marginal_likelihood(model, orderings, units="training")  # as the objective
print(f"CLML of 10 points given 90: {clml.mean():.2f} nats, {clml.std():.2f} over orders")
