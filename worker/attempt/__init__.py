"""One attempt at a job: what it reads and writes, its lease, its folders and its results."""
