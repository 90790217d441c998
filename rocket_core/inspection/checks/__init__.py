"""What is refused before any work, and why. Loads no torch."""
