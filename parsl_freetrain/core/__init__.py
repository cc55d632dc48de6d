"""The decisions, as pure functions of what is known: no Parsl, torch, file, process or wall clock.

Three packages: ``model`` has the words, events and actions; ``allocation`` states and solves the
question "which trainer gets how many nodes?"; ``controller`` asks it whenever something happens,
and says which fragments start and stop and which blocks open and close.
"""
