"""Projector files of models that read images: the tower, and what turns its outputs into tokens. Loads no torch.

llama.cpp reads them next to the file of the text model. Names of tensors and keys are those of the package `gguf`.

References:
    llama.cpp, `conversion/base.py` (`MmprojModel`), `gemma.py` and `smolvlm.py` (metadata, and what stays in float32),
    `tools/mtmd/clip.cpp` and `models/siglip.cpp` (what it computes).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocket_core.errors import InvalidConfigError, UnsupportedExportError
from rocket_core.exports.gguf_file import GgufValue, Storage, gguf_bytes
from rocket_core.exports.gguf_tensors import PlannedTensor, TensorRules
from rocket_core.inspection.files.model_files import read_file
from rocket_core.inspection.files.strict_json import parse_object

if TYPE_CHECKING:
    from gguf import TensorNameMap

_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MAX_BYTES = 2**20
# An upper bound, far above the sizes of any tower.
_MOST = 2**20
_ACTIVATION = "gelu_pytorch_tanh"
# Parts of a checkpoint, and their names in tables of `gguf`. Those of towers differ between versions of transformers.
_PARTS = {
    "vision_tower": "vision_tower.vision_model",
    "vision_model": "vision_tower.vision_model",
    "multi_modal_projector": "multi_modal_projector",
    "connector": "model.connector",
}
_KEY = re.compile(rf"(?:model\.)?({'|'.join(_PARTS)})\.(?:vision_model\.)?(.+)[._](weight|bias)")
_BLOCK = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_TEXT_KEY = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFamily:
    """A family of models that read images.

    Attributes:
        projector: llama.cpp's name of what follows the tower.
        text_type: type of the text model in settings.
        text_class: class of a model of that type alone.
    """

    projector: str
    text_type: str
    text_class: str


_IDEFICS3 = VisionFamily(projector="idefics3", text_type="llama", text_class="LlamaForCausalLM")
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "Gemma3ForConditionalGeneration": VisionFamily(
        projector="gemma3", text_type="gemma3_text", text_class="Gemma3ForCausalLM"
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
"""Families by the architecture that a model's settings name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorPlan:
    """What the projector file of a model will contain.

    Attributes:
        projector: llama.cpp's name of what follows the tower.
        metadata: metadata of the file.
    """

    projector: str
    metadata: Mapping[str, GgufValue]

    def tensor(self, key: str) -> TensorRules | None:
        """Return how a tensor of the checkpoint is written; None if it belongs to the text model.

        Args:
            key: its name in the checkpoint.

        Raises:
            UnsupportedExportError: llama.cpp has no such tensor.
        """
        found = _KEY.fullmatch(key)
        if found is None:
            return None
        module = f"{_PARTS[found[1]]}.{found[2]}"
        block = _BLOCK.search(module)
        name = _names().get_name(_BLOCK.sub("0", module, count=1))
        if name is None:
            raise UnsupportedExportError(f"llama.cpp's projector {self.projector} has no tensor for {key}")
        return TensorRules(
            name=f"{name if block is None else name.replace('.0.', f'.{block[0]}.')}.{found[3]}",
            shift=1.0 if found[2] == "mm_soft_emb_norm" else 0.0,
            exact=found[2].startswith("embeddings."),
        )

    def tensors(self, stored: Iterable[tuple[str, Sequence[int], Storage]]) -> Iterator[PlannedTensor]:
        """Yield the tensors of the file in their order.

        Args:
            stored: name, shape and storage of each tensor of the checkpoint; instead of bfloat16 they get float16.

        Raises:
            UnsupportedExportError: llama.cpp has no such tensor.
        """
        for key, shape, wanted in stored:
            rules = self.tensor(key)
            if rules is not None:
                written, storage = rules.form(shape, "F16" if wanted == "BF16" else wanted)
                yield PlannedTensor(name=rules.name, shape=written, storage=storage, parts={key: rules})

    def file_bytes(self, stored: Iterable[tuple[str, Sequence[int], Storage]]) -> int:
        """Return the size of the file.

        Args:
            stored: see `tensors`.
        """
        tensors = self.tensors(stored)
        return gguf_bytes(self.metadata, ((tensor.name, tensor.shape, tensor.storage) for tensor in tensors))


def text_key(key: str) -> str:
    """Return the name that a tensor of the text model has where that is a model by itself."""
    rest = _TEXT_KEY.sub("", key, count=1)
    return rest if rest == key or rest.startswith("lm_head.") else f"model.{rest}"


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text model alone; those of a model that reads no images as they are.

    Args:
        config: the model's settings.

    Raises:
        UnsupportedExportError: the text model is of another type than its family has in llama.cpp.
    """
    family = _family(config)
    if family is None:
        return config
    text = dict(config["text_config"])
    if text.get("model_type", family.text_type) != family.text_type:
        raise _refuse(f"a text model of the type {text['model_type']}, and {family.projector} has {family.text_type}")
    text.pop("tie_word_embeddings", None)
    shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return text | shared | {"architectures": [family.text_class]}


def plan_projector(config: Mapping[str, Any], folder: Path) -> ProjectorPlan | None:
    """Plan the projector file of a model; None if it reads no images.

    Args:
        config: the model's settings.
        folder: folder with the settings of its image processor.

    Raises:
        InvalidConfigError: the package `gguf` is not installed.
        UnsupportedExportError: llama.cpp cannot compute what the settings ask for.
    """
    family = _family(config)
    if family is None:
        return None
    if find_spec("gguf") is None:
        raise InvalidConfigError("writing a model that reads images needs gguf: pip install 'rocket-compress[gguf]'")
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, Keys

    vision, pixels, keys = config["vision_config"], _image_processor(folder), Keys.ClipVision
    if vision.get("hidden_act", _ACTIVATION) != _ACTIVATION:
        raise _refuse(f"the activation function {vision['hidden_act']} in its tower, and llama.cpp takes {_ACTIVATION}")
    return ProjectorPlan(
        projector=family.projector,
        metadata={
            Keys.General.ARCHITECTURE: GgufValue("string", MODEL_ARCH_NAMES[MODEL_ARCH.MMPROJ]),
            Keys.General.TYPE: GgufValue("string", GGUFType.MMPROJ),
            Keys.Clip.HAS_VISION_ENCODER: GgufValue("bool", True),
            Keys.Clip.PROJECTOR_TYPE: GgufValue("string", family.projector),
            keys.USE_GELU: GgufValue("bool", True),
            **{key: GgufValue("uint32", value) for key, value in _sizes(config, family, pixels).items()},
            keys.Attention.LAYERNORM_EPS: GgufValue("float32", float(vision.get("layer_norm_eps", 1e-6))),
            keys.IMAGE_MEAN: GgufValue("float32", [float(value) for value in pixels["image_mean"]]),
            keys.IMAGE_STD: GgufValue("float32", [float(value) for value in pixels["image_std"]]),
        },
    )


@cache
def _names() -> "TensorNameMap":
    from gguf import MODEL_ARCH, get_tensor_name_map

    return get_tensor_name_map(MODEL_ARCH.MMPROJ, 1)


def _family(config: Mapping[str, Any]) -> VisionFamily | None:
    return VISION_FAMILIES.get(str((config.get("architectures") or [None])[0]))


def _refuse(what: str) -> UnsupportedExportError:
    return UnsupportedExportError(f"The model cannot be written for llama.cpp: it has {what}")


def _sizes(config: Mapping[str, Any], family: VisionFamily, pixels: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of tower and images, by the keys of metadata."""
    from gguf import Keys

    vision, keys = config["vision_config"], Keys.ClipVision
    sizes = {
        keys.IMAGE_SIZE: vision["image_size"],
        keys.PATCH_SIZE: vision["patch_size"],
        keys.EMBEDDING_LENGTH: vision["hidden_size"],
        keys.FEED_FORWARD_LENGTH: vision["intermediate_size"],
        keys.BLOCK_COUNT: vision["num_hidden_layers"],
        keys.Attention.HEAD_COUNT: vision["num_attention_heads"],
        keys.PROJECTION_DIM: config["text_config"]["hidden_size"],
        keys.Projector.SCALE_FACTOR: _scale_factor(config, family),
    }
    if family is _IDEFICS3:
        sizes[keys.PREPROC_IMAGE_SIZE] = pixels["size"]["longest_edge"]
    for key, value in sizes.items():
        if not 0 < int(value) <= _MOST:
            raise _refuse(f"{key} {value}")
    return {key: int(value) for key, value in sizes.items()}


def _scale_factor(config: Mapping[str, Any], family: VisionFamily) -> int:
    """Return how many patches make a token, in each direction."""
    if family is _IDEFICS3:
        return int(config.get("scale_factor", 2))
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    tokens = math.isqrt(config.get("mm_tokens_per_image", 256))
    if side % tokens or tokens**2 != config.get("mm_tokens_per_image", 256):
        raise _refuse(f"{config['mm_tokens_per_image']} tokens for an image of {side} by {side} patches")
    return int(side // tokens)


def _image_processor(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a model's image processor."""
    found: dict[str, Any] = {}
    for name in _IMAGE_PROCESSORS:
        if (folder / name).is_file():
            settings = parse_object(read_file(folder, name, limit=_MAX_BYTES))
            found |= settings | settings.get("image_processor", {})
    if not found:
        raise _refuse(f"no settings of an image processor; add its {_IMAGE_PROCESSORS[0]}")
    skipped = next((step for step in ("do_rescale", "do_normalize") if found.get(step) is False), None)
    if skipped is not None:
        raise _refuse(f"{skipped} false in the settings of its image processor, and llama.cpp does it")
    return found
