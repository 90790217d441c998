"""What is known of prompts before a model is loaded."""

import pytest

from rocket_core.errors import InvalidConfigError
from rocket_core.evaluation import open_model, read_prompts
from rocket_core.inspection.checks import prompts
from rocket_core.inspection.checks.prompts import check_prompt_lengths, check_prompts
from tests.reference.tiny_models import byte_tokenizer, save_tiny_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}


def refusal(folder, *texts, config=CONFIG):
    try:
        check_prompt_lengths(config, texts, 4, folder, "local/tiny")
    except InvalidConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidConfigError, match="prompt 2 is empty"):
        check_prompts(CONFIG, ["Hi", ""], 4, "m")


@pytest.mark.parametrize("text", ["x" * 61, "é" * 31, "a b" * 21])
def test_what_is_refused_early_is_refused_by_the_run(folder, text):
    said = refusal(folder, "Hi", text)
    assert said.startswith("prompt 2 has 6")
    opened = open_model(folder)
    opened.config.max_position_embeddings = 64
    with pytest.raises(InvalidConfigError, match="prompt 2 has 6"):
        read_prompts(opened, ["Hi", text], 4)


def test_what_a_template_may_strip_is_not_counted(folder):
    assert refusal(folder, " " * 100 + "x" * 60 + "\n" * 9) is None


def test_without_a_readable_tokenizer_nothing_is_judged(tmp_path, folder, monkeypatch):
    assert refusal(tmp_path, "x" * 999) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal(tmp_path, "x" * 999) is None
    assert refusal(folder, "x" * 999, config={}) is None
    monkeypatch.setattr(prompts, "_MAX_TOKENIZER_BYTES", 10)
    assert refusal(folder, "x" * 999) is None
    monkeypatch.undo()
    byte_tokenizer().save_pretrained(tmp_path)
    assert refusal(tmp_path, "x" * 999) is not None
