"""Worker: claims jobs in the database and runs each in its own process."""
