"""Training at any endpoint of Globus Compute: :class:`~parsl_freetrain.FreeTrainClient`."""
