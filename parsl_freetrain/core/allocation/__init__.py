"""Which trainer gets how many nodes of which block: the problem, its rules, its solvers.

Start with ``problem.py``, which defines what is maximised.
"""
