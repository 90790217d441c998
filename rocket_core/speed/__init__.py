"""Speed and memory of models, original and compressed, side by side.

Every model runs in its own process (`process`, started by `child`), so that its memory is not mixed with that of
the others, and they take turns (`rounds`). `transformers_runtime` and `llama_cpp_runtime` run them; this process loads
neither.
"""

from rocket_core.speed.rounds import SpeedSettings, measure_speed
from rocket_core.speed.subjects import Subject, find_subject

__all__ = ["SpeedSettings", "Subject", "find_subject", "measure_speed"]
