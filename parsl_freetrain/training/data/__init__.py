"""The order of the samples, and the loader that fetches them."""
