"""The user's training loop: context, checkpoints beside it, handover to the next fragment."""
