"""The lists of repeated blocks in a model, found by their structure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.layers import is_stock_linear


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockList:
    """A list of repeated blocks. Blocks are counted through all lists of a model, in the order in which they run.

    Attributes:
        name: module name of the list.
        first: index of its first block.
        length: number of blocks.
        in_tower: whether it is in the tower that encodes images for a decoder. Its blocks are walked on their own, and
            the walk of the decoder's blocks starts afresh, with the whole tower before it: models pass on the output of
            any block of a tower, not only of the last.
    """

    name: str
    first: int
    length: int
    in_tower: bool = False

    @property
    def stop(self) -> int:
        """Index after its last block."""
        return self.first + self.length


def find_lists(model: PreTrainedModel) -> tuple[BlockList, ...]:
    """Return the lists of a decoder, an encoder (one each) or an encoder-decoder (two), in the order in which they run.

    Raises:
        UnsupportedArchitectureError: the model has fewer or more, or runs blocks more than once.
    """
    names = _block_names(model, "")
    name = type(model).__name__
    expected = 2 if model.config.is_encoder_decoder else 1
    if len(names) != expected:
        raise UnsupportedArchitectureError(
            f"{name} has {_described(names)}; only decoders, encoders (one list), encoder-decoders (two) and models "
            "with a decoder that reads text and images can be compressed"
        )
    return _counted(model, names)


def find_language_lists(model: PreTrainedModel, tower: BlockList | None = None) -> tuple[BlockList, ...]:
    """Return the list of the decoder of a model that reads text with images or audio, after that of its tower.

    Args:
        model: the model.
        tower: list of the tower; None to leave it out.

    Raises:
        UnsupportedArchitectureError: the decoder has no list or several, or runs blocks more than once.
    """
    decoder = module_name(model, model.get_decoder())
    names = _block_names(model, decoder)
    if len(names) != 1:
        raise UnsupportedArchitectureError(
            f"the decoder of {type(model).__name__} ({decoder or 'the model itself'}) has {_described(names)}, and "
            "must have one to be compressed"
        )
    return _counted(model, names, () if tower is None else (tower,))


def find_tower_list(model: PreTrainedModel, tower: str) -> BlockList:
    """Return the list of the tower that encodes images; its blocks run before those of the decoder.

    Raises:
        UnsupportedArchitectureError: the tower has no list or several.
    """
    names = _block_names(model, tower)
    if len(names) != 1:
        raise UnsupportedArchitectureError(
            f"the vision tower of {type(model).__name__} ({tower}) has {_described(names)}, and must have one to be "
            "compressed; leave 'vision' out of include"
        )
    return BlockList(name=names[0], first=0, length=len(list(model.get_submodule(names[0]).children())), in_tower=True)


def find_tower(model: PreTrainedModel, modality: Literal["image", "audio"]) -> str | None:
    """Return the name of the module that a model encodes images or audio with; None if it has no separate one."""
    tower = model.get_encoder(modality=modality)
    name = module_name(model, tower)
    decoder = module_name(model, model.get_decoder())
    return None if f"{decoder}.".startswith(f"{name}." if name else "") else name


def module_name(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module within a model; empty for the model itself."""
    found: str = next(name for name, candidate in model.named_modules() if candidate is module)
    return found


def _described(names: Sequence[str]) -> str:
    return f"{len(names)} lists of blocks ({', '.join(names)})" if names else "no list of repeated blocks"


def _counted(model: PreTrainedModel, names: list[str], before: Sequence[BlockList] = ()) -> tuple[BlockList, ...]:
    """Return the lists with their blocks counted, and check that there is a block for each layer that is run."""
    lists = list(before)
    for prefix in names:
        length = len(list(model.get_submodule(prefix).children()))
        lists.append(BlockList(name=prefix, first=lists[-1].stop if lists else 0, length=length))
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None)
    blocks = sum(found.length for found in lists if not found.in_tower)
    # LongCat-Flash counts each of its blocks twice in one field, and once in the other.
    if isinstance(layers, int) and layers > blocks != getattr(config, "num_layers", None):
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} runs {layers} layers on the weights of {blocks}; models that share "
            "weights between layers cannot be compressed"
        )
    return tuple(lists)


def _block_names(model: PreTrainedModel, root: str) -> list[str]:
    """Return the names of the lists of blocks within a module of a model."""
    block_classes = set(model._no_split_modules or ())
    prefix = f"{root}." if root else ""
    lists: dict[str, nn.ModuleList] = {
        prefix + name: module
        for name, module in model.get_submodule(root).named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    names = [name for name, module in lists.items() if any(type(block).__name__ in block_classes for block in module)]
    if names:
        return names
    # For the few models that name no block class, use the outermost lists of equal modules with linear layers.
    alike = [name for name, blocks in lists.items() if len({type(block) for block in blocks}) == 1]
    alike = [name for name in alike if any(is_stock_linear(module) for module in lists[name].modules())]
    outermost = [name for name in alike if not any(name.startswith(f"{other}.") for other in alike)]
    return outermost if model.config.is_encoder_decoder else outermost[:1]
