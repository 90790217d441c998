"""Benchmarks of speed and quality: `python -m benchmarks` runs those of speed."""
