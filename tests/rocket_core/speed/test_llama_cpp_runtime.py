import pytest

from rocket_core.errors import CorruptCheckpointError, InvalidConfigError
from rocket_core.speed import llama_cpp_runtime
from rocket_core.speed.llama_cpp_runtime import LlamaCppModel
from rocket_core.speed.messages import Load, Measure
from rocket_core.speed.subjects import Subject
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.rocket_core.exports.test_gguf_engine import export

PROMPT = (5, 40, 7, 99, 23, 8)


def load(path, **changes):
    subject = Subject(name="model", path=path, form="gguf", stored_bytes=1)
    return LlamaCppModel(Load(subject=subject, **({"device": "cpu", "threads": 1, "context": 40} | changes)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
    folder = tmp_path_factory.mktemp("llama")
    gguf_models.save("llama", folder)
    export(folder, folder / "model.gguf")
    return folder / "model.gguf"


def test_it_generates_what_the_server_generates(file):
    model = load(file)
    tokens = [model._read(PROMPT)]
    for _ in range(7):
        tokens.append(model._read((tokens[-1],)))

    assert tokens == Engine(file).greedy(list(PROMPT), 8)[0]


def test_rounds_start_from_an_empty_context(file):
    """More rounds than the context could hold together."""
    model = load(file)
    for _ in range(40):
        times = model.measure(Measure(prompt=PROMPT, new_tokens=4))
        assert times.prompt_seconds > 0
        assert times.generation_seconds > 0


def test_it_says_what_it_has_loaded(file):
    loaded = load(file).loaded

    assert (loaded.vocabulary, loaded.device, loaded.dtype) == (608, "cpu", None)
    assert loaded.positions == 256


def test_a_damaged_file_is_refused(file, tmp_path):
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:1000])

    with pytest.raises(CorruptCheckpointError, match="does not read"):
        load(tmp_path / "half.gguf")


def test_without_llama_cpp_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(llama_cpp_runtime, "find_spec", lambda _name: None)

    with pytest.raises(InvalidConfigError, match="pip install xllamacpp"):
        load(tmp_path / "model.gguf")
