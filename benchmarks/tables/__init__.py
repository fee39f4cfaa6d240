"""Regression tables of 50 to 1,000 rows: this library beside other ways to predict them.

``python -m benchmarks.tables run --results tables.sqlite`` fits and tests each method on random
rows of each table, ``report`` prints ranks, differences and worst cases. ``large run`` and ``large
report`` do the same of tables of 7,000 to 46,000 rows, beside methods that are made for these;
``classes run`` and ``classes report`` of tables whose targets are classes or counts.
"""
