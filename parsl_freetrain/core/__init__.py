"""Pure decisions: ``model`` has the words, ``allocation`` the problem, ``controller`` decides."""
