"""Solvers by name, and the process that protects this one from theirs."""

from parsl_freetrain.solver.named import allocator_named, close_allocator

__all__ = ['allocator_named', 'close_allocator']
