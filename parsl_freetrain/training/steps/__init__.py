"""One optimizer step in each mode: reproducible, DDP, Adasum."""
