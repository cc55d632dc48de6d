"""Models in stages on several ranks, and the schedules that train them."""

from parsl_freetrain.training.parallel.pipeline.pipeline import Pipeline

__all__ = ['Pipeline']
