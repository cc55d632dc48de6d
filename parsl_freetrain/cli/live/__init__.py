"""The live view of a run: in a terminal, as JSON, or as a page of a browser."""
