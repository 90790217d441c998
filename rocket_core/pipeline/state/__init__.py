"""State of a run on disk, to resume from and for later runs."""
