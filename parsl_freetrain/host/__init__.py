"""What every room needs of the operating system: private files, processes, and back-off."""
