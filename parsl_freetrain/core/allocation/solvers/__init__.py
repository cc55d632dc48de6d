"""Solvers of the allocation problem, one file for each method."""

from enum import StrEnum


class SolverName(StrEnum):
    """Names of the solvers; :func:`parsl_freetrain.solver.allocator_named` creates them."""

    AUTO = 'auto'
    MILP = 'milp'
    DP = 'dp'
    EQUAL_SHARE = 'equal-share'
