"""Train neural networks with Parsl on the nodes that supercomputers leave idle.

Users import :func:`parsl_freetrain.app.freetrain_app` and
:class:`parsl_freetrain.executor.FreeTrainExecutor`; everything else is found from there.
"""

__version__ = '2026.11.21'
