"""Objectives ``mll(output, target)``: larger is better, nats per observed point."""

from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood

__all__ = ["ConditionalMarginalLogLikelihood"]
