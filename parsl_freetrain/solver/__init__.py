"""Solvers by name, and the child process for solvers that might hang or crash."""

from parsl_freetrain.solver.choice import allocator_named, close_allocator

__all__ = ['allocator_named', 'close_allocator']
