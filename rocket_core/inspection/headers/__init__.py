"""What the headers and config of a model say: its layers, their shapes and bytes. Loads no torch."""
