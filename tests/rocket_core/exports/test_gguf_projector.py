"""Files of models that read images, as llama.cpp runs them and `gguf` names their contents."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file

from rocket_core.errors import InvalidConfigError, UnsupportedExportError
from rocket_core.exports import gguf_projector
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_projector import VISION_FAMILIES
from rocket_core.exports.gguf_writer import GgufSource, modelfile, write_model
from tests.reference import gguf_vision
from tests.reference.gguf_vision import greedy, image_inputs, picture
from tests.reference.llama_cpp import Engine


@pytest.fixture(scope="module", params=gguf_vision.MODELS)
def written(request, tmp_path_factory):
    """Return name, folder, model and tokenizer of a family, with both files in the folder in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    model, tokenizer = gguf_vision.save(request.param, folder)
    write(folder)
    return request.param, folder, model, tokenizer


def write(folder, dtype=torch.float32):
    """Write both files of a model with matrices of a dtype."""
    plan = plan_gguf(settings_of(folder), folder)
    storage = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    sources = [
        GgufSource(key=key, shape=tuple(tensor.shape), storage=storage, read=lambda tensor=tensor: tensor.to(dtype))
        for key, tensor in load_file(folder / "model.safetensors").items()
    ]
    size = write_model(folder / "model.gguf", plan, sources)
    assert size == plan.file_bytes([(source.key, source.shape, source.storage) for source in sources])
    assert size == sum((folder / name).stat().st_size for name in ("model.gguf", "mmproj.gguf"))
    return plan


def settings_of(folder, **changes):
    return json.loads((folder / "config.json").read_text()) | changes


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_llama_cpp_sees_what_transformers_does(written):
    name, folder, model, tokenizer = written
    engine = Engine(folder / "model.gguf", projector=folder / "mmproj.gguf")
    answers = []
    for seed in range(3):
        pixels, file = picture(seed)
        middle, images = image_inputs(name, pixels)
        ids = [*tokenizer("A picture:")["input_ids"], *middle, *tokenizer(" It is", add_special_tokens=False)["input_ids"]]
        tokens, chances = greedy(model, ids, images, 8)
        own_tokens, own_chances = engine.greedy(engine.prompt("A picture:", file, " It is"), 8)
        assert own_tokens == tokens
        assert own_chances == pytest.approx(chances, abs=3e-3)
        answers.append(chances)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert answers[one] != pytest.approx(answers[other], abs=0.05)
