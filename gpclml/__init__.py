"""Conditional marginal likelihoods and their neighbours as GPyTorch objectives."""

__version__ = "0.1.0"
