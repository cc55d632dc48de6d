"""Trainers: what the executor keeps of each, and the future that its user holds."""
