"""Reports of speed."""

from rocket_core.report.speed import ModelSpeed, SpeedReport, UnmeasuredModel


def model_speed(name="original", **changes):
    """Return what was measured of a model, by default the one that others are compared with."""
    usual = {
        "form": "dense",
        "runtime": "transformers",
        "device": "cpu",
        "dtype": "bfloat16",
        "stored_bytes": 4_000_000,
        "memory_bytes": 10_000_000,
        "load_seconds": 0.5,
        "prompt_rate": 1234.5,
        "generation_rate": 50,
        "prompt_ratio": 1,
        "generation_ratio": 1,
    }
    return ModelSpeed(name=name, **(usual | changes))


def speed_report(*others, **changes):
    """Return a report on the original, other models, and one that was not measured."""
    usual = {
        "prompt_tokens": 128,
        "new_tokens": 64,
        "rounds": 5,
        "threads": 2,
        "processor": "a processor",
        "models": (model_speed(), *others),
        "unmeasured": (UnmeasuredModel(name="gguf", form="gguf", reason="llama.cpp is not installed"),),
    }
    return SpeedReport(**(usual | changes))
