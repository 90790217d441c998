"""Time, memory and disk that a run will need, from a model's headers and config. Loads no torch."""
