"""The decisions of the live system on a recorded trace: what FreeTrain would have done on a real machine's record."""
