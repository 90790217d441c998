"""Time, memory and disk of a compression at the sizes of real models, measured on a few of their blocks."""
