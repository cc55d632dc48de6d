"""The sizes of the training that all systems do; importing them does not import torch."""

BATCH = 64
SAMPLES = 8192
EVERY_S = 2.0  # between two checkpoints
DIGEST_STEPS = 25
WIDTH = 768

# What a rank finds in its environment: the folder of the log, the name of its node, and the file of
# the checkpoint of plain DDP.
LOG_VARIABLE, NODE_VARIABLE, SAVED = 'VERSUS_LOG', 'VERSUS_NODE', 'VERSUS_SAVED'
