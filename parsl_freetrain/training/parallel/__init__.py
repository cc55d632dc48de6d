"""Networks divided among ranks: in space, by parameters (sharding), and in pipelines (layers)."""
