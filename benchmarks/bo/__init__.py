"""Bayesian optimization with surrogates fitted under several objectives.

``python -m benchmarks.bo run`` computes, ``python -m benchmarks.bo report`` shows. One cell is
one optimization of a test function; every surrogate and objective starts from the same points
for the same seed, so that differences are paired.
"""
