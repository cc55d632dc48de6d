"""Searches over the settings of a training, where bad ones are dropped early."""
