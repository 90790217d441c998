"""The complete compression: from a model to a smaller model that loads, or only to a profile that answers every ratio.

Stages: `preflight` checks everything before long work; `calibrating` walks the dense model block by block and profiles
its layers; `allocating` solves the knapsack; `factorizing` walks the blocks again; `exporting` writes the artifacts.
`state.work_folder` stores finished work, from which a stopped run resumes; `state.profile_cache` stores profiles for
later runs. `heal` trains a finished artifact, and `evaluate_artifact` compares one with its original.
"""

from rocket_core.pipeline.artifact_evaluation import evaluate_artifact
from rocket_core.pipeline.healing import heal
from rocket_core.pipeline.observer import Observer, Progress
from rocket_core.pipeline.run import compress, profile_model
from rocket_core.pipeline.state.profile_cache import ProfileCache
from rocket_core.report.notebook import show_in_notebooks

__all__ = ["Observer", "ProfileCache", "Progress", "compress", "evaluate_artifact", "heal", "profile_model"]

show_in_notebooks()
