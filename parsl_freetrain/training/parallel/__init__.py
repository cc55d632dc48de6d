"""Networks that are divided among ranks: in space (parts of a sample on several ranks) and in
pipelines (layers on several ranks).
"""
