"""Laplace posteriors of networks, as an estimator."""

from gpclml.laplace.laplace import Laplace

__all__ = ["Laplace"]
