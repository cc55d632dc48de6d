"""Holes and blocks: an adapter per scheduler, and the provider that opens blocks of any size."""
