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
from parsl_freetrain.training.parallel.pipeline.schedule_facts import (
    activations,
    bubbles,
    faults,
    makespan,
)

__all__ = [
    'METHODS',
    'Pipeline',
    'PipelineSchedule',
    'activations',
    'bubbles',
    'chimera',
    'faults',
    'gpipe',
    'make_schedule',
    'makespan',
    'one_f_one_b',
]
