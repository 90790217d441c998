"""Healing: training of what an artifact stores, and its files."""
