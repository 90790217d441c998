"""Memory needed while a tower that encodes images is compressed, from the shapes of a model alone. Loads no torch."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocket_core.inspection.headers.block_lists import list_of
from rocket_core.inspection.headers.model_fields import find_number, longer_side
from rocket_core.inspection.headers.weight_summary import WeightSummary
from rocket_core.sizes.budget import Shape

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """The sizes of the blocks of a tower, whose layers are compressed.

    Attributes:
        hidden_size: numbers per patch between two blocks.
        widest: most numbers per patch at either end of a layer.
        block_parameters: parameters of its largest block.
        parameters: parameters of all its blocks.
    """

    hidden_size: int
    widest: int
    block_parameters: int
    parameters: int

    @classmethod
    def of(cls, layers: Iterable[Shape], block_parameters: Iterable[int]) -> "TowerShape | None":
        """Return the sizes of a tower; None if no layer of it is selected.

        Args:
            layers: `(d_in, d_out)` of its layers; the narrowest input is that of attention, the hidden states.
            block_parameters: parameters of each block.
        """
        shapes, parameters = list(layers), list(block_parameters)
        if not shapes:
            return None
        return cls(
            hidden_size=min(d_in for d_in, _ in shapes),
            widest=max(max(shape) for shape in shapes),
            block_parameters=max(parameters),
            parameters=sum(parameters),
        )

    def held_numbers(self, *, patches: int, samples: int) -> int:
        """Return the numbers of a block and of the hidden states of all samples, before and after it.

        Args:
            patches: patches of a sample.
            samples: number of samples.
        """
        return self.block_parameters + 2 * patches * samples * self.hidden_size


def tower_of_headers(
    layers: Mapping[str, Sequence[Shape]], weights: WeightSummary, lists: Collection[str]
) -> TowerShape | None:
    """Return the sizes of a tower according to the safetensors headers; None if no layer of it is selected.

    Args:
        layers: `(d_in, d_out)` of the selected layers, by block.
        weights: summary of the headers.
        lists: names of the lists of blocks in the tower.
    """
    return TowerShape.of(
        (shape for block, shapes in layers.items() if list_of(block) in lists for shape in shapes),
        (count for block, count in weights.block_parameters.items() if list_of(block) in lists),
    )


def patch_numbers(config: Mapping[str, object]) -> int:
    """Return how many numbers of an image, as the model reads it, make a patch.

    Args:
        config: the content of config.json.
    """
    tower = _tower_of(config)
    channels = find_number(tower, ("in_channels", "in_chans", "num_channels")) or 3
    frames = find_number(tower, ("temporal_patch_size",)) or 1
    return channels * frames * max(1, longer_side(tower, "patch_size")) ** 2


def tower_workload(config: Mapping[str, object], sequence_length: int) -> dict[str, int]:
    """Return the fields of a `Workload` for a compressed tower, before its images are known.

    Patches are those of one image where the tower has a size for it, otherwise those whose features fill a sample.

    Args:
        config: the content of config.json.
        sequence_length: tokens of a sample.
    """
    tower = _tower_of(config)
    image, patch = (longer_side(tower, name) for name in ("image_size", "patch_size"))
    merged = (find_number(tower, ("spatial_merge_size",)) or 1) ** 2
    patches = (image // patch) ** 2 + 1 if image and patch else sequence_length * merged
    return {"patches": patches, "input_bytes": patches * patch_numbers(config) * _FLOAT32}


def _tower_of(config: Mapping[str, object]) -> Mapping[str, object]:
    tower = config.get("vision_config")
    return tower if isinstance(tower, Mapping) else {}
