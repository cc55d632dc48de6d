"""The command line: ``freetrain ...``."""
