"""What runs on compute nodes: fragment context, checkpoints, ranks, data order."""
