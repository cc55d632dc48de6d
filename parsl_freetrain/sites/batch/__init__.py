"""What sites with a batch scheduler share; each adds its questions, answers and scripts."""
