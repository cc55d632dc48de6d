"""Models in stages on several ranks, and the schedules that train them."""

from parsl_freetrain.training.parallel.pipeline.pipeline import Pipeline
from parsl_freetrain.training.parallel.pipeline.schedule import (
    METHODS,
    PipelineSchedule,
    chimera,
    gpipe,
    make_schedule,
    one_f_one_b,
)

__all__ = [
    'METHODS', 'Pipeline', 'PipelineSchedule', 'chimera', 'gpipe', 'make_schedule', 'one_f_one_b',
]  # fmt: skip
