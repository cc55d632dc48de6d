"""The command line: one file, or one folder, for each verb of ``freetrain``."""
