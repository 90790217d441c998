"""What a run keeps on disk to resume from, and for later runs."""
