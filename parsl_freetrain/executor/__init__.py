"""The Parsl part: the executor, its interchange, and the channel to the nodes."""
