"""Holes and blocks: one small adapter per scheduler, and the provider that opens blocks of any
size.
"""
