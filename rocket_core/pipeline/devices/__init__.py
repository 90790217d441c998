"""Work on blocks that is shared among processes, each on a device of its own."""
