"""The words of a run as frozen dataclasses: types, events, errors, metric expressions."""
