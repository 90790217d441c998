"""Runs jobs: claims them in the database and gives each to a process of its own."""
