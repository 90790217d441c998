"""The stages of a run, in the order of `rocket_core.pipeline.run`."""
