"""The tests; a package, so that tests can import what they share from :mod:`tests.support`."""
