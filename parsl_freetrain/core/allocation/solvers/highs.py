"""Linear programmes whose columns are choices, for HiGHS."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LARGEST = 1e5  # of the scaled worths: solvers stop at absolute tolerances of 1e-7 to 1e-5
# Of integer programmes. By default, HiGHS does not look for what is better by less than 1e-6.
EXACT = {'mip_rel_gap': 0.0, 'mip_abs_gap': 0.0, 'mip_feasibility_tolerance': 1e-9}


def scale_of(largest: float) -> float:
    return LARGEST / largest if largest > 0 else 1.0


def solved(
    worth: Floats, use: Floats, least: Floats, most: Floats, integer: bool = False, **options: Any
) -> tuple[Any, float]:
    """Maximise ``worth @ x``, 0 <= x <= 1 (``integer``: binary), with ``least <= x @ use <= most``;
    ``use``: (choices, rows). Returns HiGHS after its run, and the factor of the worths.
    """
    column, row = np.nonzero(use)
    return solved_sparse(worth, (column, row, use[column, row]), least, most, integer, **options)


def solved_sparse(
    worth: Floats,
    use: tuple[Ints, Ints, Floats],
    least: Floats,
    most: Floats,
    integer: bool = False,
    **options: Any,
) -> tuple[Any, float]:
    """As :func:`solved`; ``use``: choice (increasing), row and value of each entry but 0."""
    import highspy  # takes long to import, and most problems are solved without it

    scale = scale_of(float(np.abs(worth).max(initial=0.0)))
    column, row, value = use
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(worth), len(least)
    lp.col_cost_ = -worth * scale
    lp.col_lower_, lp.col_upper_ = np.zeros(len(worth)), np.ones(len(worth))
    lp.row_lower_, lp.row_upper_ = least, most
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(column, np.arange(len(worth) + 1)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row.astype(np.int32), value
    if integer:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(worth)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, setting in ({'output_flag': False, 'threads': 1} | options).items():
        solver.setOptionValue(option, setting)
    solver.passModel(lp)
    solver.run()
    return solver, scale
