"""Networks that are divided among ranks: in space (parts of a sample), by parameters (sharding),
and in pipelines (layers).
"""
