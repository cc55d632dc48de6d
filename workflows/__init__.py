"""Workflows to run and to copy from."""
