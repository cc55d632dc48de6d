"""Which trainer gets how many nodes of which block; ``problem.py`` says what is maximised."""
