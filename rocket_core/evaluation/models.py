"""Model folders to evaluate, dense or compressed."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

import rocket_core.hf  # noqa: F401 - teaches transformers to load compressed folders
from rocket_core.checkpoint import open_checkpoint
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.engines import ExportKind
from rocket_core.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    InvalidConfigError,
    ModelNotFoundError,
    UnsupportedArchitectureError,
)
from rocket_core.experts import fused_parameters, unfuse
from rocket_core.exports import mlx, olive
from rocket_core.exports.gguf_model import GgufPlan, plan_gguf
from rocket_core.exports.gguf_reader import read_weights
from rocket_core.hub.repository import offline
from rocket_core.inspection.files.model_advice import advice_on_folder
from rocket_core.inspection.files.model_files import CONFIG_NAME, vet_folder
from rocket_core.inspection.files.safetensors_headers import local_weight_files, read_header
from rocket_core.inspection.headers.coded_tensors import CodedFormat, coded_format
from rocket_core.inspection.headers.model_fields import check_sizes
from rocket_core.inspection.headers.weight_summary import summarize_files
from rocket_core.layers import QUANT_METHOD
from rocket_core.models.classes import generating_class, is_causal, named_class, reads_images_and_text
from rocket_core.models.pretrained import check_settings, interpreting, load_config, load_tokenizer
from rocket_core.report.run_commands import PROJECTOR_NAME
from rocket_core.sizes.code_format import CODE_BITS

# Families whose files `transformers` 5.23 is meant to read, and fails to.
_UNREADABLE = frozenset({"gpt_oss"})
# The module that `transformers` needs to read an export, and the extra of this distribution that has it.
_PACKAGES: Mapping[ExportKind, tuple[str, str]] = {
    "compressed-tensors": ("compressed_tensors", "vllm"),
    "gguf": ("gguf", "gguf"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A model on disk, with everything but its weights loaded.

    Attributes:
        path: the folder.
        config: its configuration.
        tokenizer: its tokenizer.
        predicts_tokens: whether it is a causal language model; otherwise it is a text encoder, or a decoder
            with another head or none.
        gguf_file: name of the GGUF file with the weights; None if they are in safetensors.
        gguf_plan: what that file contains, if `transformers` does not read files of the family.
    """

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    predicts_tokens: bool
    gguf_file: str | None = None
    gguf_plan: GgufPlan | None = None


def open_model(path: Path) -> ModelFolder:
    """Read a model's configuration and tokenizer. No code from the folder is run.

    Args:
        path: the model with its tokenizer.

    Raises:
        ModelNotFoundError: the folder contains no model.
        CheckpointFormatError: its files cannot be read.
        UnsupportedArchitectureError: not a causal language model or text encoder that `transformers` knows.
    """
    if not (path / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{path} holds no model: there is no {CONFIG_NAME}; {advice_on_folder(path)}")
    vet_folder(path, str(path))
    config = load_config(path)
    check_settings(path)
    with offline():
        tokenizer = load_tokenizer(path, config)
    with interpreting(f"{path / CONFIG_NAME}", UnsupportedArchitectureError):
        causal = is_causal(config)
        encodes = _encodes_text(config)
    if not causal and not encodes:
        raise UnsupportedArchitectureError(
            f"{path} holds a {config.model_type} model, which neither predicts the tokens of a text nor encodes them; "
            "it can neither be evaluated on text nor healed"
        )
    return ModelFolder(path=path, config=config, tokenizer=tokenizer, predicts_tokens=causal)


def check_package(kind: ExportKind) -> None:
    """Raise an error if a package is missing that `transformers` reads an export with.

    Raises:
        InvalidConfigError: names the package and how to install it.
    """
    module, extra = _PACKAGES.get(kind, (None, None))
    if module is not None and find_spec(module) is None:
        raise InvalidConfigError(f"evaluating the export {kind} needs {module}: pip install 'rocket-compress[{extra}]'")


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files of models in a folder that has no configuration, as of an export for llama.cpp."""
    if (path / CONFIG_NAME).exists():
        return []
    return sorted(file for file in path.glob("*.gguf") if file.name != PROJECTOR_NAME)


def open_gguf(path: Path, original: ModelFolder) -> ModelFolder:
    """Open a folder with a GGUF file, which is read with the configuration and the tokenizer of its original.

    If the original reads images, it is the text model alone.

    Args:
        path: the folder.
        original: the model that the file was made from.

    Raises:
        InvalidConfigError: the package that reads such files is not installed.
        CheckpointFormatError: there are several files.
        UnsupportedExportError: neither `transformers` nor Rocket reads files of this family.
    """
    check_package("gguf")
    vet_folder(path, str(path))
    files = gguf_files(path)
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointFormatError(f"{path} has {len(files)} GGUF files ({names}); evaluate a folder with one of them")
    model_type = original.config.model_type.removesuffix("_text")
    reads_images = reads_images_and_text(original.config)
    is_read = not reads_images and model_type in set(GGUF_SUPPORTED_ARCHITECTURES) - _UNREADABLE
    fields = {key: value for key, value in original.config.to_dict().items() if key != "quantization_config"}
    plan = None if is_read else plan_gguf(fields, original.path)
    config = original.config.get_text_config() if reads_images else original.config
    return replace(original, path=path, config=config, gguf_file=files[0].name, gguf_plan=plan)


def load_model(folder: ModelFolder, device: torch.device, *, as_deployed: bool = False) -> PreTrainedModel:
    """Load a model for inference from safetensors only.

    By default it is loaded to read many tokens at once: compressed layers are held dense, and it runs in its stored
    dtype, on a CPU in float32 at least.

    Args:
        folder: the model.
        device: device to load it on.
        as_deployed: load it as `from_pretrained` alone does, to generate.

    Raises:
        UnsupportedArchitectureError: `transformers` cannot load it.
        CheckpointError: weights are missing or damaged.
    """
    # Load the class that the checkpoint names: a bare encoder may have a pooler that the checkpoint lacks.
    if folder.gguf_file is not None:
        return _prepared(_load_gguf(folder), device)
    table = getattr(folder.config, "quantization_config", None) or {}
    if hasattr(folder.config, "quantization"):
        return _prepared(_load_decoded(folder, folder.config.quantization, mlx.dense_weights), device)
    if table.get("quant_method") == olive.QUANT_METHOD:
        return _prepared(_load_decoded(folder, table, olive.dense_weights), device)
    named = generating_class(folder.config) if folder.predicts_tokens else named_class(folder.config)
    vet_folder(folder.path, str(folder.path))
    files = local_weight_files(folder.path, str(folder.path))
    config = copy.deepcopy(folder.config)
    quantization = getattr(config, "quantization_config", None)
    coded = None
    if quantization is not None and quantization.get("quant_method") not in (QUANT_METHOD, "compressed-tensors"):
        coded = coded_format(config.to_dict(), str(folder.path))
    weights = summarize_files((read_header(file, str(file)) for file in files), str(folder.path), coded)
    if quantization is not None and coded is None:
        if quantization.get("quant_method") == QUANT_METHOD and not as_deployed:
            # Many tokens at once are fastest with the dense weight, which is the same on every device.
            config.quantization_config = {"keep_packed": False} | quantization
        # Codes are stored several to a number: of an embedding to a byte, of compressed-tensors to a word.
        weights = replace(weights, largest_tensor=weights.largest_tensor * 32 // min(CODE_BITS))
    # Without the table of compressed layers, which has an entry per layer.
    fields = {key: value for key, value in folder.config.to_dict().items() if key != "quantization_config"}
    check_sizes(fields, weights, str(folder.path))
    device_map = device if as_deployed and device.type != "cpu" else None
    if coded is not None:
        loaded = _load_coded(folder, coded, config, device_map)
    else:
        loaded = _load(
            named or AutoModel, folder.path, config=config, use_safetensors=True, dtype="auto", device_map=device_map
        )
    return cast("PreTrainedModel", loaded.eval()) if as_deployed else _prepared(loaded, device)


def _load_coded(
    folder: ModelFolder, coded: CodedFormat, config: PreTrainedConfig, device_map: torch.device | None
) -> Any:
    """Return a model whose weights are in few bits, decoded: transformers decodes FP8 in whole blocks only."""
    del config.quantization_config
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if folder.predicts_tokens else MODEL_MAPPING
    weights = {key: entry.read() for key, entry in open_checkpoint(folder.path, coded).entries.items()}
    return _load(
        named_class(config) or classes[type(config)],
        folder.path,
        config=config,
        state_dict=weights,
        dtype=DTYPES[coded.dtype],
        device_map=device_map,
    )


def _load_gguf(folder: ModelFolder) -> Any:
    """Return a model whose weights are in a GGUF file, dequantized to float32 as llama.cpp computes."""
    assert folder.gguf_file is not None
    options: dict[str, Any] = {"config": copy.deepcopy(folder.config), "dtype": torch.float32}
    if folder.gguf_plan is None:
        return _load(AutoModelForCausalLM, folder.path, gguf_file=folder.gguf_file, **options)
    loader: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(folder.config)]
    weights = read_weights(folder.path / folder.gguf_file, folder.gguf_plan)
    with torch.device("meta"):
        model = loader(options["config"])
    unfuse(model)
    for name, fused in fused_parameters(model).items():
        # In other families `transformers` puts the tensors of experts together.
        if fused.parts.keys() <= weights.keys():
            whole = torch.empty(fused.by_expert)
            for key, part in fused.parts.items():
                part.of(whole).copy_(weights.pop(key))
            weights[name] = whole.view(fused.shape)
    return _load(loader, folder.path, state_dict=weights, **options)


def _load_decoded(
    folder: ModelFolder,
    quantization: Mapping[str, Any],
    decode: Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]],
) -> Any:
    """Return a model whose weights are stored for an engine that `transformers` does not know, decoded."""
    config = copy.deepcopy(folder.config)
    for name in ("quantization", "quantization_config"):
        if hasattr(config, name):
            delattr(config, name)
    vet_folder(folder.path, str(folder.path))
    tensors = {key: entry.read() for key, entry in open_checkpoint(folder.path).entries.items()}
    weights = decode(quantization, tensors)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32}
    return _load(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], folder.path, state_dict=weights, **options)


def _load(loader: Any, path: Path, **options: Any) -> Any:
    """Return a model with all its weights, from a folder unless they are given."""
    source = None if "state_dict" in options else path
    with interpreting(str(path), CheckpointFormatError), _loading(path), offline():
        answer: Any = loader.from_pretrained(source, local_files_only=True, output_loading_info=True, **options)
    loaded, info = answer
    # For missing weights transformers only warns and uses random values; the result would be meaningless.
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise CorruptCheckpointError(
            f"{path} lacks {len(lacking)} weights, first {lacking[0]}; its files are incomplete or belong to another "
            f"{CONFIG_NAME}"
        )
    return loaded


def _decode_nvfp4(model: nn.Module) -> None:
    """Decode layers of NVFP4, which compressed-tensors does in bfloat16 when they are used, whatever the model runs in.

    They are the same numbers in any dtype.
    """
    for module in model.modules():
        if "weight_global_scale" in module._parameters:
            from compressed_tensors.compressors import decompress_module

            decompress_module(module)
            # So that nothing decodes it again.
            del module.quantization_scheme


def _prepared(loaded: Any, device: torch.device) -> PreTrainedModel:
    """Return a loaded model on a device, in the dtype that it runs in."""
    _decode_nvfp4(loaded)
    model = cast("PreTrainedModel", nn.Module.to(loaded, device))
    if device.type == "cpu":
        # Rounding in both models would count as their difference: SmolLM2-135M in bfloat16 has 0.002 nats of it.
        nn.Module.to(model, torch.promote_types(model.dtype, torch.float32))
    model.eval()
    return model


def check_token_ids(folder: ModelFolder, model: PreTrainedModel, highest: int) -> None:
    """Reject tokens that a model has no embedding for.

    Raises:
        CheckpointFormatError: the tokenizer belongs to another model.
    """
    embeddings = int(cast("Tensor", model.get_input_embeddings().weight).shape[0])
    if highest >= embeddings:
        raise CheckpointFormatError(
            f"the tokenizer of {folder.path} gives token {highest}, but the model has {embeddings} embeddings; use the "
            "tokenizer that belongs to the model"
        )


def _encodes_text(config: PreTrainedConfig) -> bool:
    if getattr(config, "is_encoder_decoder", False):
        return False
    known = MODEL_MAPPING.get(type(config), None)
    return getattr(known, "main_input_name", None) == "input_ids"


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Convert exceptions that transformers raises while loading into errors of this library."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except OSError as error:
        raise CheckpointFormatError(
            f"{folder} cannot be loaded: {_first_line(error)}; weights are read from safetensors only"
        ) from error
    except (SafetensorError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"weights of {folder} cannot be loaded: {_first_line(error)}; copy or download them again"
        ) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedArchitectureError(
            f"{folder} cannot be loaded as a language model or encoder: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
