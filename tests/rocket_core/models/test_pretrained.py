import json
import re
import shutil
import socket

import pytest
import transformers
from transformers.integrations import hub_kernels

from rocket_core.config import compression_config
from rocket_core.errors import CheckpointFormatError, InsufficientMemoryError, RocketError, UnsupportedArchitectureError
from rocket_core.evaluation import evaluate_text
from rocket_core.models.pretrained import interpreting, load_config, load_tokenizer, tokenize
from rocket_core.pipeline import compress
from tests.reference.hostile_models import CODE, SECRET, UNREADABLE, edit_json
from tests.reference.observers import Watch
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("ordinary") / "llama")


@pytest.fixture
def model(ordinary, tmp_path):
    return shutil.copytree(ordinary, tmp_path / "model")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a text that has nothing to do with the model. " * 40)
    return file


@pytest.fixture
def settings(text):
    calibration = {"dataset": str(text), "samples": 4, "sequence_length": 16}
    return compression_config(
        ratio=0.3, calibration=calibration, preset="paper", cap_slack=0.01, export=("rocket", "dense")
    )


@pytest.fixture
def kernels(monkeypatch):
    """Record names of kernels that transformers was about to load; connections are refused."""
    asked = []

    def load(name, *_args, **_kwargs):
        asked.append(name)
        raise ImportError("not here")

    def refuse(*_):
        raise AssertionError("a connection was attempted")

    for function in ("load_and_register_attn_kernel", "lazy_load_kernel", "get_kernel"):
        monkeypatch.setattr(hub_kernels, function, load)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def stop_after_preflight(model, output, settings):
    """Compress until the end of preflight; errors are not caught."""
    stages = set()
    compress(
        str(model),
        output,
        settings,
        observer=Watch(
            on_progress=lambda progress: stages.add(progress.stage), should_cancel=lambda: bool(stages - {"preflight"})
        ),
    )


@pytest.mark.parametrize("build", UNREADABLE.values(), ids=UNREADABLE)
def test_a_hostile_file_is_refused_before_long_work(build, model, text, settings, tmp_path):
    expected = build(model)
    with pytest.raises(RocketError, match=re.escape(expected)) as compressed:
        stop_after_preflight(model, tmp_path / "output", settings)
    with pytest.raises(RocketError) as evaluated:
        evaluate_text(model, text, sequence_length=16, limit=1, device="cpu")
    for refused in (compressed, evaluated):
        assert refused.value.code not in ("cancelled", "rocket_error")
        assert "model" in str(refused.value)


@pytest.mark.parametrize("build", CODE.values(), ids=CODE)
def test_no_setting_reaches_the_kernel_loader(build, model, text, settings, tmp_path, kernels):
    build(model)
    report = compress(str(model), tmp_path / "output", settings)
    evaluate_text(model, text, sequence_length=16, limit=1, device="cpu")
    assert report.totals.achieved_ratio > 0
    assert kernels == []


def test_a_stock_loader_would_load_such_a_kernel(model, kernels):
    edit_json(model / "config.json", _attn_implementation="org/kernel")
    with pytest.raises(ImportError):
        transformers.AutoModelForCausalLM.from_pretrained(model)
    assert kernels == ["org/kernel"]


def test_exported_settings_refer_to_no_code(model, settings, tmp_path):
    for build in CODE.values():
        build(model)
    edit_json(model / "generation_config.json", custom_generate="org/name")
    compress(str(model), tmp_path / "output", settings)
    for kind in ("rocket", "dense"):
        for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
            exported = (tmp_path / "output" / kind / file).read_text()
            assert json.loads(exported)
            assert not re.search("auto_map|org/|custom_generate|kernel|fusion", exported), (kind, file)


def test_ordinary_settings_are_copied_byte_for_byte(model, settings, tmp_path):
    file = model / "tokenizer_config.json"
    file.write_text(file.read_text().replace("\n", "\n\n"))
    compress(str(model), tmp_path / "output", settings)
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "output" / "dense" / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((tmp_path / "output" / "dense" / "config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )


def test_a_tokenizer_opens_no_file_outside_its_folder(model, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    edit_json(model / "tokenizer_config.json", vocab_file=str(secret), tokenizer_file=str(secret), vocab=str(secret))
    tokenizer = load_tokenizer(model, load_config(model))
    assert SECRET not in tokenizer.get_vocab()
    assert tokenizer("a")["input_ids"] == [tokenizer.convert_tokens_to_ids("a")]


@pytest.mark.parametrize("name", ["charsmap-is-cut-off", "charsmap-is-empty", "pieces-of-no-length"])
def test_a_rust_panic_becomes_a_rocket_error(name, model):
    UNREADABLE[name](model)
    with pytest.raises(CheckpointFormatError, match="tokenizer"):
        tokenize(load_tokenizer(model, load_config(model)), "a text")


def test_unexpected_errors_are_not_converted(model):
    with pytest.raises(ZeroDivisionError), interpreting("config.json"):
        _ = 1 // 0


def test_running_out_of_memory_names_the_file():
    with pytest.raises(InsufficientMemoryError, match=r"config\.json"), interpreting("config.json"):
        raise MemoryError


def test_an_interruption_is_not_converted():
    with pytest.raises(KeyboardInterrupt), interpreting("config.json"):
        raise KeyboardInterrupt


def test_builtin_implementations_are_kept(model):
    edit_json(model / "config.json", attn_implementation="eager")
    assert load_config(model)._attn_implementation == "eager"


def test_an_unknown_architecture_is_named(model):
    edit_json(model / "config.json", model_type="made-up")
    with pytest.raises(UnsupportedArchitectureError, match="made-up"):
        load_config(model)
