"""The whole compression: a model in, a smaller model that loads out; or only the profile that answers every ratio.

Stages: `preflight` looks before anything long begins; `calibrating` walks the dense model block by block and profiles
its layers; `allocating` solves the knapsack; `factorizing` walks the blocks again; `exporting` writes the artifacts.
`work_folder` holds what is finished, so that a run resumes where it stopped; `kept_profiles` what later runs may use.
"""

from rocket_core.pipeline.progress import Progress
from rocket_core.pipeline.run import compress, profile_model
from rocket_core.pipeline.state.profile_cache import KeptProfiles

__all__ = ["KeptProfiles", "Progress", "compress", "profile_model"]
