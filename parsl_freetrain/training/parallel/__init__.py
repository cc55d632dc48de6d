"""Networks that are divided among ranks: space (this sample's parts on several ranks) and pipelines (its layers)."""
