"""Gaussian process regression on UCI data sets under several objectives.

``python -m benchmarks.uci run`` computes, ``python -m benchmarks.uci report`` shows. One cell
is one model trained on a few random rows of a data set and tested on rows set apart; every
kernel and objective sees the same rows for the same seed, so that differences are paired.
"""
