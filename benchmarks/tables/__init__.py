"""Regression tables of 50 to 1,000 rows: this library beside other ways to predict them.

``python -m benchmarks.tables run --results tables.sqlite`` fits and tests each method on random
rows of each table, ``report`` prints ranks, differences and worst cases.
"""
