"""Checkpoints: their content and format, and how they survive a kill at any moment."""
