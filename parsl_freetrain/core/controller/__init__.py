"""The controller: events in, actions out. Start with ``controller.py``."""
