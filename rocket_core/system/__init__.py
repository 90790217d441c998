"""The machine: devices, processor, energy, garbage collection."""
