"""Training from afar, through any endpoint of Globus Compute: ``client`` has the
:class:`~parsl_freetrain.FreeTrainClient`, ``orders`` what it sends, ``endpoint`` and ``run`` what
runs over there.
"""
