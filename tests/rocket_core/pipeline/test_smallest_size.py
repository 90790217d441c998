"""The smallest size, known from headers, from the built model and from profiles: all three agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rocket_core.checkpoint import find_model, open_checkpoint
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.exports.gguf_size import dense_file_bytes
from rocket_core.inspection.checks.feasibility import check_feasible
from rocket_core.inspection.checks.model_reach import reach_of_headers
from rocket_core.pipeline import ProfileCache, compress, profile_model
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.requirements import reach_of_run
from tests.reference import gguf_models
from tests.reference.sequence_models import save_sequence_model
from tests.reference.tiny_mixtures import save_tiny_mixture
from tests.reference.tiny_models import save_tiny_model
from tests.sampling import sweep

BUNDLED = Path("examples/tiny-llama")
SYNTHETIC = {"dataset": "synthetic", "samples": 4, "sequence_length": 16}
FAMILIES = ("llama", "gemma", "gpt2", "bert", "t5", "mt5", "bart", "whisper")
QUICK = [("gemma", {}), ("t5", {"storage": "memory"})]
SLOW = [
    *((family, {}) for family in FAMILIES if family != "gemma"),
    *((family, {"storage": "memory"}) for family in FAMILIES if family != "t5"),
    ("llama", {"kinds": ("quantized", "entropy_coded")}),
    ("llama", {"kinds": ("quantized",), "code_bits": (4, 8)}),
    ("llama", {"engine": "vllm", "dtype": "bfloat16"}),
    ("bart", {"dtype": "bfloat16", "max_shard_bytes": 20_000}),
]


@pytest.fixture
def save(tmp_path):
    def make(family):
        folder = tmp_path / family
        if family in ("bart", "mt5"):
            save_sequence_model(family, folder)
        elif family in ("llama_cpp", "mixture"):
            folder.mkdir()
            gguf_models.save("llama", folder) if family == "llama_cpp" else save_tiny_mixture("mixtral", folder)
        else:
            save_tiny_model(family, folder)
        settings = json.loads((folder / "config.json").read_text())
        return folder, settings, open_checkpoint(folder).weights

    return make


def sized(settings, size, **changes):
    engine = {"export": ("rocket",)} if "engine" not in changes else {"export": ("compressed-tensors",)}
    own = {"ratio": None, "target_bytes": size, "preset": "fast", "sensitivity_samples": 2}
    return settings(**(own | engine | changes))


def config_of(family, settings, size, **changes):
    return sized(settings, size, **(({"calibration": SYNTHETIC} if family == "whisper" else {}) | changes))


def least(reach):
    return reach.other_bytes + reach.smallest * reach.unit_bytes


@pytest.mark.parametrize(("family", "changes"), sweep(QUICK, soak=SLOW), ids=str)
def test_the_smallest_size_is_known_before_profiling(family, changes, save, settings, tmp_path):
    folder, fields, weights = save(family)
    config = config_of(family, settings, 10**9, **changes)
    told, built = reach_of_headers(fields, weights, config), reach_of_run(prepare_run(find_model(str(folder)), config))
    assert told == replace(built, dense=told.dense)
    profiles = ProfileCache(tmp_path / "profiles")
    only_profile = config_of(family, settings, None, budget="bytes", **changes)
    found = profile_model(str(folder), tmp_path / "profile", only_profile, profiles=profiles)
    smallest = found.predictor().smallest_bytes
    # In layers as small as these, how much the table of an entropy code takes is not known.
    assert least(told) <= smallest <= told.model_bytes <= 1.01 * least(told)
    with pytest.raises(InfeasibleBudgetError, match="out of reach"):
        check_feasible(fields, weights, config_of(family, settings, least(told) - 1, **changes), "m")
    reached = config_of(family, settings, smallest, **changes)
    check_feasible(fields, weights, reached, "m")
    report = compress(str(folder), tmp_path / "out", reached, profiles=profiles)
    assert report.exports[0].stored_bytes <= smallest


def test_a_gguf_file_is_known_with_its_tokenizer(save, settings):
    pytest.importorskip("gguf")
    folder, fields, weights = save("llama_cpp")
    config = settings(ratio=None, target_bytes=10**9, preset="fast", engine="llama.cpp")
    built = reach_of_run(prepare_run(find_model(str(folder)), config))
    whole = dense_file_bytes(fields, weights, config, folder)
    told = reach_of_headers(fields, weights, config, dense_file_bytes=whole)
    assert least(told) == least(built) == told.model_bytes == built.model_bytes
    # That of a repository is not known before the download.
    unsure = reach_of_headers(fields, weights, config)
    assert least(unsure) < least(built) < unsure.model_bytes


def test_the_bundled_model_for_llama_cpp_is_refused_at_once(settings):
    fields = json.loads((BUNDLED / "config.json").read_text())
    weights = open_checkpoint(BUNDLED).weights
    config = settings(ratio=None, target_bytes=1_323_000, preset="fast", engine="llama.cpp")
    whole = dense_file_bytes(fields, weights, config, BUNDLED)
    with pytest.raises(InfeasibleBudgetError, match=r"at least 1\.486MB; ask for that or more"):
        reach_of_headers(fields, weights, config, dense_file_bytes=whole).check(config.target)


@pytest.mark.parametrize("changes", [{}, {"preset": "paper"}, {"code_bits": 8}, {"ignore": ("*.0.*",)}], ids=str)
def test_bounds_contain_the_size_where_headers_tell_less(changes, save, settings):
    for family in ("mixture", "llama"):
        folder, fields, weights = save(family)
        config = sized(settings, 10**9, **changes)
        told = reach_of_headers(fields, weights, config)
        built = reach_of_run(prepare_run(find_model(str(folder)), config))
        assert least(told) <= least(built)
        assert built.model_bytes <= told.model_bytes


@pytest.mark.parametrize(("tied", "pattern"), [(True, "lm_head"), (False, "embed_tokens"), (False, "*.q_proj")])
def test_an_ignored_table_is_not_promised(tied, pattern, save, settings):
    folder, fields, weights = save("gemma" if tied else "llama")
    config = sized(settings, 10**9, ignore=(pattern,))
    told = reach_of_headers(fields, weights, config)
    built = reach_of_run(prepare_run(find_model(str(folder)), config))
    assert least(told) <= least(built) <= built.model_bytes <= told.model_bytes
