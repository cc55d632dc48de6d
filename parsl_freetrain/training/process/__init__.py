"""Processes of a compute node: node agent, fork server, liveness."""
