"""Blocks: opened, adopted, given back."""
