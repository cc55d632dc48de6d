"""Replays: the decisions of the live system on a recorded trace of a real machine."""
