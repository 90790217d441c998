"""Work on blocks that is shared among processes, one per device."""
