"""What happened: every event, decision, block, fragment, checkpoint and node-second, in one SQLite
file.
"""
