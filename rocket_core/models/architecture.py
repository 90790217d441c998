"""Structure of a Hugging Face model: its repeated blocks and the linear layers that can be compressed.

Everything is discovered; nothing is copied from modeling files. A layer is compressible if its type is exactly
`nn.Linear` or `Conv1D`, it is inside a repeated block, is not tied, is not the head, routes no tokens, and is later
seen by a forward hook. Experts of a mixture get their own linear layers first (`rocket_core.experts`). A model has one
list of blocks; an encoder-decoder has two. In a model that reads text and images, these are the blocks of the decoder,
and those of its tower where they are asked for. Token embedding and head are listed separately.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from rocket_core.config import InputKind
from rocket_core.errors import (
    InvalidConfigError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.experts import UnfusedExperts, unfuse, unknown_experts
from rocket_core.inspection.checks import preconditions
from rocket_core.inspection.headers.coded_tensors import coded_format, refused_format
from rocket_core.inspection.headers.layer_names import advice_on_pattern, last_part
from rocket_core.inspection.headers.model_fields import HIDDEN_SIZES, find_number, positions
from rocket_core.layers import is_stock_linear
from rocket_core.models.block_lists import (
    BlockList,
    find_language_lists,
    find_lists,
    find_tower,
    find_tower_list,
)
from rocket_core.models.called_lists import is_called
from rocket_core.models.classes import (
    build_model,
    decodes_several_kinds,
    generating_class,
    is_causal,
    reads_images_and_text,
    without_weights,
)
from rocket_core.models.pretrained import interpreting, load_config
from rocket_core.models.token_tables import TokenTable, find_tables

# Input kind by the model's main argument.
_KINDS: dict[str, InputKind] = {"input_ids": "text", "pixel_values": "images", "input_features": "audio"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model without weights, and the location of its blocks.

    Attributes:
        model: the model, with parameters on the meta device and real buffers.
        lists: the lists of repeated blocks, in the order in which they run: one, or an encoder's and a decoder's, or a
            tower's and a decoder's.
        layers: names of the compressible layers of each block, in model order.
        tables: token embedding and head, where they can be quantized.
        other_tables: token embedding and head that cannot, with the reason.
        tower: name of the module that encodes images for a decoder, which text alone does not reach.
        audio_tower: name of the module that encodes audio for a decoder.
        tower_layers: the layers in the blocks of `tower` that could be compressed, unless `layers` has them.
    """

    model: PreTrainedModel
    lists: tuple[BlockList, ...]
    layers: tuple[tuple[str, ...], ...]
    tables: tuple[TokenTable, ...] = ()
    other_tables: Mapping[str, str] = field(default_factory=dict)
    tower: str | None = None
    audio_tower: str | None = None
    tower_layers: tuple[str, ...] = ()

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated blocks of a model with one list of them.

        Raises:
            UnsupportedArchitectureError: the model has an encoder and a decoder.
        """
        if len(self.lists) != 1:
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__} is an encoder-decoder, which this stage does not know how to run"
            )
        return self.blocks_of(self.lists[0])

    def blocks_of(self, blocks: BlockList) -> nn.ModuleList:
        """Return the modules of a list."""
        modules = self.model.get_submodule(blocks.name)
        assert isinstance(modules, nn.ModuleList)
        return modules

    @property
    def language_lists(self) -> tuple[BlockList, ...]:
        """The lists without that of a tower."""
        return tuple(blocks for blocks in self.lists if not blocks.in_tower)

    def list_of(self, index: int) -> BlockList:
        """Return the list that block `index` belongs to."""
        return next(blocks for blocks in self.lists if blocks.first <= index < blocks.stop)

    def block_name(self, index: int) -> str:
        """Return the module name of block `index`."""
        blocks = self.list_of(index)
        return f"{blocks.name}.{index - blocks.first}"

    @property
    def is_causal(self) -> bool:
        """Whether the model predicts each token only from those before it."""
        return is_causal(self.model.config)

    @property
    def class_name(self) -> str:
        """The transformers class that loads the model: an Auto class for a decoder, else the model's own class."""
        return str(generating_class(self.model.config).__name__) if self.is_causal else type(self.model).__name__

    @property
    def kind(self) -> InputKind:
        """The kind of input that the model reads."""
        return _KINDS[self.model.main_input_name]

    def shape(self, layer: str) -> tuple[int, int]:
        """Return `(d_in, d_out)` of a layer; a token table has an output for every token."""
        d_in, d_out = oriented_weight(self.model.get_submodule(layer)).shape
        return d_in, d_out

    def outputs(self, layer: str) -> int:
        """Return the numbers that a layer returns for a token; for a token embedding these are its columns."""
        d_in, d_out = self.shape(layer)
        return d_in if isinstance(self.model.get_submodule(layer), nn.Embedding) else d_out

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has embeddings for."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, tied ones counted once."""
        tied = set(self.model.all_tied_weights_keys)
        return sum(value.numel() for name, value in self.model.named_parameters() if name not in tied)

    @property
    def compressible_parameters(self) -> int:
        """Number of parameters of the compressible layers."""
        shapes = [self.shape(name) for block in self.layers for name in block]
        return sum(d_in * d_out for d_in, d_out in shapes)


def read_config(folder: Path) -> PretrainedConfig:
    """Read `config.json` and reject models that cannot be compressed; weights in few bits that are read are left out.

    Args:
        folder: checkpoint folder.

    Raises:
        ModelNotFoundError: config.json does not exist.
        AlreadyQuantizedError: the weights are already compressed, or quantized in a way that is not read.
        UnsupportedArchitectureError: the installed transformers does not know the architecture.
    """
    config = load_config(folder)
    if coded_format(config.to_dict(), str(folder)) is not None:
        del config.quantization_config
    quantization = next(_quantizations(config.to_dict()), None)
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise refused_format(str(folder), f"quant_method {method!r} of a part of it")
    return config


def build_architecture(config: PretrainedConfig, dtype: torch.dtype, *, vision: bool = False) -> Architecture:
    """Build the model without its weights and find its compressible layers.

    A decoder is built as a causal language model; any other model as the class named by its config, or else as the
    family's base model.

    Args:
        config: the model's configuration.
        dtype: dtype of the parameters.
        vision: whether the layers of the tower that encodes images are compressible.

    Raises:
        UnsupportedArchitectureError: the model does not have one list of repeated blocks (an encoder-decoder: two), has
            no plain linear layer in them, or reads an input that calibration cannot generate.
        InvalidConfigError: the layers of a tower are asked for, and it has none.
    """
    with (
        interpreting(_file_of(config), UnsupportedArchitectureError),
        without_weights(),
    ):
        model = build_model(config, dtype)
        unfuse(model)
        _check_readable(model)
    model.eval()
    model.requires_grad_(requires_grad=False)
    if model.main_input_name not in _KINDS:
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} reads {model.main_input_name}; only models that read text, images or log-mel "
            "features of audio can be calibrated"
        )
    is_part = decodes_several_kinds(config)
    tower = find_tower(model, "image") if reads_images_and_text(config) else None
    if vision and tower is None:
        raise InvalidConfigError(
            f"{type(model).__name__} has no tower that encodes images for a decoder; leave 'vision' out of include"
        )
    of_tower = None
    if tower is not None and vision:
        of_tower = find_tower_list(model, tower)
        # Installed the first time that a model wants hidden states of its tower, which must not be while other modules
        # take the place of the tower's blocks.
        module = model.get_submodule(tower)
        if isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)
    lists = find_language_lists(model, of_tower) if is_part else find_lists(model)
    prefixes = [f"{blocks.name}.{index}" for blocks in lists for index in range(blocks.length)]
    layers = tuple(tuple(_linear_names(model, prefix)) for prefix in prefixes)
    if not any(layers):
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer in {lists[0].name} that could be compressed"
        )
    tables: tuple[TokenTable, ...] = ()
    others: dict[str, str] = {}
    if model.main_input_name == "input_ids" or config.is_encoder_decoder:
        tables, others = find_tables(model, predicts=is_causal(config) or config.is_encoder_decoder)
    return Architecture(
        model=model,
        lists=lists,
        layers=layers,
        tables=tables,
        other_tables=others,
        tower=tower,
        audio_tower=find_tower(model, "audio") if is_part else None,
        tower_layers=() if tower is None or vision else _layers_of_tower(model, tower),
    )


def window_length(
    config: PretrainedConfig, requested: int | None, usual: int = preconditions.DEFAULT_WINDOW_LENGTH
) -> int:
    """Return the number of tokens per window of text.

    Args:
        config: the model's configuration.
        requested: the user's choice; None takes the usual length, or the model's context length if that is less.
        usual: the usual length.

    Raises:
        InvalidConfigError: fewer than 2 tokens, or more than the model has positions for.
    """
    return preconditions.window_length(positions(config.to_dict()), requested, usual)


def oriented_weight(module: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """Return a view of a layer's weight as `(d_in, d_out)`: `nn.Linear` stores the transpose, `Conv1D` does not."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if type(module) is Conv1D else weight.detach().mT


def ignored_layers(names: Sequence[str], patterns: Iterable[str], tables: Iterable[str] = ()) -> dict[str, str]:
    """Return the layers and token tables that ignore patterns match, each with its first matching pattern.

    Args:
        names: names of all compressible layers.
        patterns: glob patterns on the full name, such as `*.down_proj` or `model.layers.0.*`; those of tables may also
            match the last part of a name, such as `embed_tokens`.
        tables: names of the modules that use a token table.

    Raises:
        UnmatchedIgnoreError: a pattern matches no layer and no table.
    """
    ignored: dict[str, str] = {}
    tables = tuple(tables)
    for position, pattern in enumerate(patterns):
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        matches += [
            name for name in tables if any(fnmatch.fnmatchcase(part, pattern) for part in (name, last_part(name)))
        ]
        if not matches:
            raise UnmatchedIgnoreError(
                f"ignore pattern {pattern!r} matches none of the {len(names)} compressible layers; "
                f"{advice_on_pattern(names, pattern)}",
                position=position,
            )
        for name in matches:
            ignored.setdefault(name, pattern)
    return ignored


def _file_of(config: PretrainedConfig) -> str:
    folder = config.name_or_path
    return f"{folder}/config.json" if folder else f"the configuration of type {config.model_type!r}"


def _quantizations(config: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield descriptions of quantized weights in a configuration, including those of parts of the model."""
    for key, value in config.items():
        if key == "quantization_config" and value is not None:
            yield value
        elif isinstance(value, dict) and str(key).endswith("_config"):
            yield from _quantizations(value)


def _check_readable(model: PreTrainedModel) -> None:
    """Access attributes of the model that are needed later, so that wrong types in its configuration raise now."""
    text = model.config.get_text_config()
    if int(getattr(text, "vocab_size", 0) or 0) < 0:
        raise ValueError("vocab_size is negative")
    model.get_output_embeddings()
    model.num_parameters()
    isinstance(model.main_input_name, str)


def _layers_of_tower(model: PreTrainedModel, tower: str) -> tuple[str, ...]:
    try:
        blocks = find_tower_list(model, tower)
    except UnsupportedArchitectureError:
        return ()
    prefixes = (f"{blocks.name}.{index}" for index in range(blocks.length))
    return tuple(name for prefix in prefixes for name in _linear_names(model, prefix))


def _linear_names(model: PreTrainedModel, block: str) -> list[str]:
    tied_keys = model.all_tied_weights_keys
    tied = {*tied_keys.keys(), *tied_keys.values()}
    part = model.get_submodule(block)
    hidden_size = find_number(model.config.get_text_config().to_dict(), HIDDEN_SIZES)
    left = {model.get_output_embeddings(), *routing_layers(part, hidden_size or 0)}
    return [
        f"{block}.{name}"
        for name, module in part.named_modules()
        # Not subclasses that compute something else, as some routers are.
        if is_stock_linear(module) and module not in left and f"{block}.{name}.weight" not in tied
    ]


def routing_layers(block: nn.Module, hidden_size: int) -> Iterator[nn.Module]:
    """Yield the linear layers next to a block's experts that belong to a module which returns no hidden states.

    They are small, and an error in them sends tokens to other experts, which their squared error does not show. The
    gate of a shared expert, which has one output, chooses none.

    Args:
        block: the block, whose experts are separate modules or stored together in an unknown way.
        hidden_size: width of the model's hidden states.
    """
    together = {name.rpartition(".")[0] for name in unknown_experts(block)}
    for name, experts in block.named_modules():
        separate = isinstance(experts, nn.ModuleList | nn.ModuleDict) and is_called(experts)
        if not separate and (not name or name not in together):
            continue
        widths = {hidden_size, experts.layout.hidden if isinstance(experts, UnfusedExperts) else hidden_size}
        for part in block.get_submodule(name.rpartition(".")[0]).children():
            layers = [module for module in part.modules() if is_stock_linear(module)]
            if part is not experts and not any(_outputs(layer) in {1, *widths} for layer in layers):
                yield from layers


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.get_parameter("weight").shape[1])
