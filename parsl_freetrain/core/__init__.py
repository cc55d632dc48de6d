"""Pure decisions: no Parsl, no torch, no file, no process, no wall clock."""
