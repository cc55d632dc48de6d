"""Fragments: one Parsl task each, one member on each node."""
