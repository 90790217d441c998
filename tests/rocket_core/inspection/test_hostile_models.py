"""Random config.json and tokenizer.json files, for which only errors of the library may be raised."""

import copy
import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocket_core.calibration.inputs import open_source
from rocket_core.checkpoint import WeightLoader, open_checkpoint
from rocket_core.errors import RocketError
from rocket_core.inspection.checks.preconditions import check_config, parse_config
from rocket_core.inspection.headers.model_fields import check_sizes
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.models.pretrained import check_settings, tokenize
from tests.reference.tiny_models import save_tiny_model

TEXT = "A text, of 3 lines.\n\tFi\u200bve \u00e9, \ufb01 and \u4e16\u754c\n" * 3

# Numbers of hypothesis examples. `make soak` runs many more.
_USUAL, _FEW = 100, 25

few = settings(
    max_examples=_FEW if settings.default.max_examples == _USUAL else settings.default.max_examples,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

numbers = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([-(2**63), 2**31, 2**62, 2**64, 10**9, 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
)
names = st.sampled_from(
    ["eager", "org/kernel", "silu", "made-up", "default", "yarn", "linear", "[PAD]", "<s>", "", "a"]
)
scalars = st.one_of(st.none(), st.booleans(), numbers, names, st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(names | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("ordinary") / "llama")


@pytest.fixture(scope="module")
def folder(ordinary, tmp_path_factory):
    return shutil.copytree(ordinary, tmp_path_factory.mktemp("hostile") / "model")


def interpret(folder):
    """Interpret a model's files as a run does before long work, in the same order."""
    config = parse_config((folder / "config.json").read_bytes(), "the model")
    check_config(config, "the model")
    checkpoint = open_checkpoint(folder)
    check_sizes(config, checkpoint.weights, "the model")
    architecture = build_architecture(read_config(folder), torch.float32)
    WeightLoader(architecture.model, checkpoint, torch.device("cpu"))
    check_settings(folder)
    return open_source(folder, architecture, 8)


def interpret_or_refuse(folder):
    try:
        source = interpret(folder)
        tokenize(source.tokenizer, TEXT, add_special_tokens=False, verbose=False)
    except RocketError:
        return


def places(content, path=()):
    """Return paths of all values in a JSON document, but only a few of long lists and tables."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(inner)[:40]:
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(content, path, value):
    changed = copy.deepcopy(content)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_an_ordinary_model_is_interpreted(ordinary):
    source = interpret(ordinary)
    assert len(tokenize(source.tokenizer, "abc", add_special_tokens=False)["input_ids"]) == 3


@few
@given(data=st.data())
def test_a_config_with_altered_values_is_read_or_refused(data, ordinary, folder):
    content = json.loads((ordinary / "config.json").read_text())
    for path in data.draw(st.lists(st.sampled_from(sorted(places(content), key=str)), min_size=1, max_size=3)):
        if len(path) == 1:
            content = replaced(content, path, data.draw(values))
    (folder / "config.json").write_text(json.dumps(content))
    shutil.copyfile(ordinary / "tokenizer.json", folder / "tokenizer.json")
    interpret_or_refuse(folder)


@few
@given(extra=st.dictionaries(st.text(max_size=20), values, max_size=4))
def test_a_config_with_extra_keys_is_read_or_refused(extra, ordinary, folder):
    (folder / "config.json").write_text(json.dumps(json.loads((ordinary / "config.json").read_text()) | extra))
    shutil.copyfile(ordinary / "tokenizer.json", folder / "tokenizer.json")
    interpret_or_refuse(folder)


@few
@given(data=st.data())
def test_a_tokenizer_with_altered_values_is_read_or_refused(data, ordinary, folder):
    content = json.loads((ordinary / "tokenizer.json").read_text())
    path = data.draw(st.sampled_from(sorted(places(content), key=str)))
    (folder / "tokenizer.json").write_text(json.dumps(replaced(content, path, data.draw(values))))
    shutil.copyfile(ordinary / "config.json", folder / "config.json")
    interpret_or_refuse(folder)


patterns = st.one_of(
    st.fixed_dictionaries({"String": st.text(max_size=3)}),
    st.fixed_dictionaries({"Regex": st.text("a.*+?()[]^$|\\d", max_size=6)}),
)
behaviors = st.sampled_from(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
steps = st.one_of(
    st.fixed_dictionaries({"type": st.just("Replace"), "pattern": patterns, "content": st.text(max_size=40)}),
    st.fixed_dictionaries({"type": st.just("Prepend"), "prepend": st.text(max_size=40)}),
    st.fixed_dictionaries({"type": st.just("Precompiled"), "precompiled_charsmap": st.text("AB/w=", max_size=24)}),
    st.fixed_dictionaries({"type": st.sampled_from(["NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"])}),
)
normalizers = st.one_of(
    steps, st.fixed_dictionaries({"type": st.just("Sequence"), "normalizers": st.lists(steps, max_size=6)})
)
pre_tokenizers = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("Split"), "pattern": patterns, "behavior": behaviors, "invert": st.booleans()}
    ),
    st.fixed_dictionaries({"type": st.just("FixedLength"), "length": st.integers(-1, 3)}),
    st.fixed_dictionaries({"type": st.just("Punctuation"), "behavior": behaviors}),
)


@few
@given(normalizer=normalizers, pre_tokenizer=pre_tokenizers)
def test_a_tokenizer_with_other_steps_is_read_or_refused(normalizer, pre_tokenizer, ordinary, folder):
    content = json.loads((ordinary / "tokenizer.json").read_text())
    content |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shutil.copyfile(ordinary / "config.json", folder / "config.json")
    interpret_or_refuse(folder)


@few
@given(data=st.data())
def test_altered_tokenizer_settings_are_read_or_refused(data, ordinary, folder):
    content = json.loads((ordinary / "tokenizer_config.json").read_text())
    keys = [*content, "added_tokens_decoder", "extra_special_tokens", "vocab", "merges", "init_inputs", "auto_map"]
    content |= data.draw(st.dictionaries(st.sampled_from(sorted(keys)), values, max_size=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    for file in ("config.json", "tokenizer.json"):
        shutil.copyfile(ordinary / file, folder / file)
    interpret_or_refuse(folder)
    shutil.copyfile(ordinary / "tokenizer_config.json", folder / "tokenizer_config.json")
