"""Inspection of a model without loading its weights. Loads no torch."""
