"""The machine: devices, processor, energy, cyclic garbage collection."""
