"""What sites with a batch scheduler share; a scheduler adds its questions, its answers and its
scripts.
"""
