"""Lists of numbered blocks in a checkpoint, known by the names of its tensors. Loads no torch."""

from collections.abc import Mapping

from rocket_core.inspection.headers.weight_summary import WeightSummary

# Modules that encode images for a decoder, by the names that transformers gives them.
_TOWERS = frozenset({"vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"})
# Modules that encode or make audio for a decoder, likewise.
_AUDIO = frozenset({"audio_tower", "semantic_tokenizer_encoder", "acoustic_tokenizer_encoder", "diffusion_head"})


def has_tower(config: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a decoder that reads images through its own tower."""
    return isinstance(config.get("vision_config"), Mapping) and not config.get("is_encoder_decoder")


def compressed_lists(config: Mapping[str, object], weights: WeightSummary, *, vision: bool = False) -> set[str]:
    """Return the names of the lists whose blocks are compressed.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers.
        vision: whether the blocks of a tower are compressed as well.
    """
    sizes: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for block, count in weights.block_parameters.items():
        sizes[list_of(block)] = sizes.get(list_of(block), 0) + count
        lengths[list_of(block)] = lengths.get(list_of(block), 0) + 1
    if isinstance(config.get("text_config"), Mapping):
        sizes = {name: size for name, size in sizes.items() if _AUDIO.isdisjoint(name.split("."))}
    if has_tower(config):
        # By length, as what merges features may be in a list as well.
        towers = {name: lengths[name] for name in list(sizes) if _is_in_tower(name)}
        return {_largest({name: size for name, size in sizes.items() if name not in towers})} | (
            {_largest(towers)} if vision else set()
        )
    largest = _largest(sizes)
    if not config.get("is_encoder_decoder"):
        return {largest}
    pair = (largest.replace("decoder", "encoder"), largest.replace("encoder", "decoder"))
    return {name for name in pair if name in sizes}


def block_of(name: str) -> str:
    """Return the name of the block that a parameter belongs to: its name up to the first number."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def list_of(block: str) -> str:
    """Return the name of the list that contains a block."""
    return block.rpartition(".")[0]


def _is_in_tower(name: str) -> bool:
    return not _TOWERS.isdisjoint(name.split("."))


def _largest(sizes: Mapping[str, int]) -> str:
    return max(sizes, key=lambda name: sizes[name], default="")
