"""Training scripts of other libraries in fragments. Each library is an extra of this package."""
