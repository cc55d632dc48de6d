"""Training through a Globus Compute endpoint."""
