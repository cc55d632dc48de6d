"""The journal of runs: every event, in the order in which it happened, in one file."""
