"""Files of models that read images, as llama.cpp runs them and `gguf` names their contents."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file

from rocket_core.config import compression_config
from rocket_core.errors import InvalidConfigError, UnsupportedExportError
from rocket_core.exports import gguf_projector
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_size import dense_file_bytes
from rocket_core.exports.gguf_writer import GgufSource, gguf_storage, modelfile, write_model
from rocket_core.hub.requests import read_weights
from tests.reference import gguf_vision
from tests.reference.gguf_vision import greedy, image_inputs, picture
from tests.reference.llama_cpp import Engine


@pytest.fixture(scope="module", params=gguf_vision.MODELS)
def written(request, tmp_path_factory):
    """Return name, folder, model and tokenizer of a family, with both files in the folder in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    model, tokenizer = gguf_vision.save(request.param, folder)
    write(folder, folder)
    return request.param, folder, model, tokenizer


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


def write(folder, output, dtype=torch.float32):
    """Write both files of a model whose tensors have a dtype."""
    plan = plan_gguf(settings_of(folder), folder)
    sources = [
        GgufSource(key=key, shape=tuple(tensor.shape), storage=gguf_storage(dtype), read=lambda t=tensor: t.to(dtype))
        for key, tensor in load_file(folder / "model.safetensors").items()
    ]
    size = write_model(output / "model.gguf", plan, sources)
    assert size == plan.file_bytes([(source.key, source.shape, source.storage) for source in sources])
    assert size == sum((output / name).stat().st_size for name in ("model.gguf", "mmproj.gguf"))
    assert modelfile(plan) == "FROM ./model.gguf\nFROM ./mmproj.gguf\n"


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_llama_cpp_sees_what_transformers_does(written):
    name, folder, model, tokenizer = written
    engine = Engine(folder / "model.gguf", projector=folder / "mmproj.gguf")
    before, after = tokenizer("A picture:")["input_ids"], tokenizer(" It is", add_special_tokens=False)["input_ids"]
    answers = []
    for seed in range(3):
        pixels, file = picture(seed)
        inside, images = image_inputs(name, pixels)
        tokens, chances = greedy(model, [*before, *inside, *after], images, 8)
        own_tokens, own_chances = engine.greedy(engine.prompt("A picture:", file, " It is"), 8)
        assert own_tokens == tokens
        assert own_chances == pytest.approx(chances, abs=3e-3)
        answers.append(chances)
    # None of them is what another image makes of the prompt.
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert answers[one] != pytest.approx(answers[other], abs=0.05)


def test_every_tensor_is_in_one_of_the_files(written):
    _, folder, model, _ = written
    text, projector = (tensors_of(folder / name) for name in ("model.gguf", "mmproj.gguf"))
    assert len(text) + len(projector) == len(load_file(folder / "model.safetensors"))
    assert not [name for name in projector if not name.startswith(("v.", "mm."))]
    blocks = model.config.vision_config.num_hidden_layers
    assert {f"v.blk.{number}.ffn_up.weight" for number in range(blocks)} < set(projector)


def test_metadata_are_those_that_the_package_names(written):
    name, folder, model, _ = written
    fields = {key: field.contents() for key, field in gguf.GGUFReader(folder / "mmproj.gguf").fields.items()}
    assert fields["clip.projector_type"] in vars(gguf.VisionProjectorType).values()
    assert fields["general.architecture"] == gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ]
    assert fields["clip.vision.image_mean"] == pytest.approx(gguf_vision.PIXELS["image_mean"])
    assert fields["clip.vision.projection_dim"] == model.config.text_config.hidden_size
    assert fields["clip.vision.projector.scale_factor"] == gguf_vision.IMAGE_SIZE // 8 // gguf_vision.SIDE
    assert fields.get("clip.vision.preproc_image_size") == (None if name == "gemma3" else gguf_vision.IMAGE_SIZE)


def test_a_tower_in_bfloat16_is_written_in_float16(written, tmp_path):
    name, folder, _, _ = written
    write(folder, tmp_path, torch.bfloat16)
    kinds = {key: tensor.tensor_type.name for key, tensor in tensors_of(tmp_path / "mmproj.gguf").items()}
    assert {kinds.pop("v.patch_embd.weight"), kinds.pop("v.position_embd.weight")} == {"F32"}
    assert {kind for key, kind in kinds.items() if key.endswith(".bias") or "norm" in key or ".ln" in key} == {"F32"}
    assert kinds["v.blk.0.ffn_up.weight"] == kinds["v.blk.1.attn_q.weight"] == "F16"
    assert kinds["mm.input_projection.weight" if name == "gemma3" else "mm.model.fc.weight"] == "F16"
    engine = Engine(tmp_path / "model.gguf", projector=tmp_path / "mmproj.gguf")
    assert len(engine.greedy(engine.prompt("A picture:", picture(0)[1], " It is"), 4)[0]) == 4


@pytest.mark.parametrize(
    ("key", "text", "projector"),
    [
        ("model.language_model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight", None),
        ("language_model.model.norm.weight", "output_norm.weight", None),
        ("language_model.lm_head.weight", None, None),
        ("vision_tower.vision_model.encoder.layers.12.mlp.fc2.bias", None, "v.blk.12.ffn_down.bias"),
        ("model.vision_tower.encoder.layers.0.self_attn.out_proj.weight", None, "v.blk.0.attn_out.weight"),
        ("model.multi_modal_projector.mm_input_projection_weight", None, "mm.input_projection.weight"),
        ("multi_modal_projector.mm_soft_emb_norm.weight", None, "mm.soft_emb_norm.weight"),
    ],
)
def test_names_of_other_versions_are_known(key, text, projector, tmp_path):
    plan = planned("gemma3", tmp_path)
    found = (plan.tensor(key), plan.projector.tensor(key))
    assert tuple(rules and rules.name for rules in found) == (text, projector)


def planned(name, folder, change=lambda settings, pixels: None):
    """Plan the files of a family with changed settings."""
    gguf_vision.save(name, folder)
    settings, pixels = settings_of(folder), dict(gguf_vision.PIXELS)
    change(settings, pixels)
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return plan_gguf(settings, folder)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("idefics3", lambda own, _: own["text_config"].update(model_type="mistral"), "type mistral, and idefics3 has"),
        ("smolvlm", lambda own, _: own["vision_config"].update(hidden_act="relu"), "relu in its tower"),
        ("gemma3", lambda own, _: own.update(mm_tokens_per_image=9), "9 tokens for an image of 4 by 4 patches"),
        ("gemma3", lambda own, _: own.update(mm_tokens_per_image=8), "8 tokens for an image"),
        ("gemma3", lambda _, pixels: pixels.update(do_normalize=False), "do_normalize false"),
        ("gemma3", lambda _, pixels: pixels.pop("image_std"), "image_std"),
        ("gemma3", lambda _, pixels: pixels.clear(), "no settings of an image processor"),
        ("gemma3", lambda own, _: own.pop("vision_config"), "vision_config"),
        ("smolvlm", lambda own, _: own["vision_config"].update(image_size=10**12), "image_size 1000000000000"),
        ("smolvlm", lambda _, pixels: pixels.update(size={"longest_edge": 0}), "preproc_image_size 0"),
        ("gemma3", lambda own, _: own.update(architectures=["LlavaForConditionalGeneration"]), "LlavaForConditional"),
    ],
)
def test_what_llama_cpp_cannot_see_is_named(name, change, reason, tmp_path):
    with pytest.raises(UnsupportedExportError, match=reason):
        planned(name, tmp_path, change)


def test_a_tensor_that_it_has_no_place_for_is_named(tmp_path):
    with pytest.raises(UnsupportedExportError, match=r"projector gemma3 has no tensor for vision_tower\.head\.probe"):
        planned("gemma3", tmp_path).tensor("vision_tower.head.probe.weight")


def test_settings_within_those_of_a_processor_are_read(tmp_path):
    expected = planned("gemma3", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": gguf_vision.PIXELS}))
    assert plan_gguf(settings_of(tmp_path), tmp_path) == expected


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_projector, "find_spec", lambda _name: None)
    with pytest.raises(InvalidConfigError, match=r"rocket-compress\[gguf\]"):
        planned("gemma3", tmp_path)


def test_the_size_is_known_from_headers_and_settings(written):
    _, folder, _, _ = written
    settings = settings_of(folder)
    weights, config = read_weights(folder, "m"), compression_config(engine="llama.cpp", target_bytes=10**6)
    size = sum((folder / name).stat().st_size for name in ("model.gguf", "mmproj.gguf"))
    assert dense_file_bytes(settings, weights, config, folder) == size
    # transformers has values for what settings leave out.
    del settings["vision_config"]["intermediate_size"]
    assert dense_file_bytes(settings, weights, config, folder) is None
