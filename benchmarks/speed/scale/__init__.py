"""Beyond one Cholesky factor: accuracy, cost and use of what scales."""
