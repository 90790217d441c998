import pytest
from pydantic import ValidationError

from rocket_core.config import STAGES, CompressionConfig, compression_config, stage_label
from rocket_core.errors import InvalidConfigError


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": 0.2, "target_bytes": 1000}, "target_bytes"),
        ({"target_bytes": 0}, "target_bytes"),
        ({"target_bytes": 1000, "export": ("dense",)}, "rocket"),
        ({"target_bytes": 1000, "method": "svd-llm"}, "svd-llm"),
        ({"bits": 0}, "bits: Input should be greater than 0"),
        ({"bits": -1}, "bits: Input should be greater than 0"),
        ({"bits": 16.01}, "bits: Input should be less than or equal to 16"),
        ({"bits": float("nan")}, "bits: Input should be a finite number"),
        ({"bits": float("inf")}, "bits: Input should be a finite number"),
        ({"bits": 4, "method": "wanda"}, "wanda"),
        ({"method": "wanda"}, "ratio"),
        ({"ratio": 0.2, "ration": 0.3}, "ration"),
        ({"ratio": 0.2, "objective": "wight"}, "objective"),
        ({"ratio": 0.2, "export": ()}, "export"),
        ({"ratio": 0.2, "export": ("dense", "dense")}, "export"),
        ({"ratio": 0.2, "calibration": {"samples": 0}}, "calibration.samples"),
        ({"ratio": 0.2, "dtype": "int8"}, "dtype"),
        ({"ratio": 0.2, "ridge": 0.0}, "ridge"),
        ({"ratio": 0.2, "accept": {"max_kl": 0.1}}, "none is requested: add evaluate"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings, named):
    with pytest.raises(InvalidConfigError, match=named):
        compression_config(**settings)


@pytest.mark.parametrize(
    ("accept", "said"),
    [
        ({}, "accept: .*give at least one of max_kl, max_perplexity_increase, max_task_drop"),
        ({"max_kl": None}, "accept: .*give at least one of"),
        ({"max_kl": 0}, "accept.max_kl: Input should be greater than 0"),
        ({"max_kl": -0.1}, "accept.max_kl: Input should be greater than 0"),
        ({"max_kl": float("inf")}, "accept.max_kl: Input should be a finite number"),
        ({"max_kl": float("nan")}, "accept.max_kl: Input should be a finite number"),
        ({"max_perplexity_increase": 0}, "accept.max_perplexity_increase: Input should be greater than 0"),
        ({"max_perplexity_increase": 2}, "accept.max_perplexity_increase: .*for 2 %, write 0.02"),
        ({"max_task_drop": 0.01}, "accept.max_task_drop is about zero-shot tasks, .* add evaluate.tasks"),
        ({"max_task_drop": 1}, "accept.max_task_drop: .*should be less than 1"),
        ({"max_kll": 1}, "accept.max_kll: Extra inputs are not permitted"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(accept, said):
    with pytest.raises(InvalidConfigError, match=said):
        compression_config(ratio=0.3, evaluate={}, accept=accept)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"calibration": {"samples": 8}}, "which calibration needs; leave it out, or take preset fast"),
        ({"calibration": {"dataset": "c4"}}, "which calibration needs"),
        ({"method": "gptq"}, "which method gptq needs"),
        ({"refine": True}, "which refine needs"),
        ({"sequential": True}, "which sequential needs"),
        ({"sweeps": 1}, "which sweeps needs"),
        ({"heal_tokens": 1000}, "which heal_tokens needs"),
        ({"column_weights": True}, "which column_weights needs"),
        ({"calibrate_all_experts": True}, "which calibrate_all_experts needs"),
        ({"include": ("vision",)}, "which include vision needs"),
        ({"kinds": ("quantized", "sparse")}, "only quantizes; leave sparse out of kinds"),
        ({"budget": "parameters"}, "budget must be bytes"),
    ],
)
def test_what_needs_calibration_is_refused_without_it(settings, named):
    with pytest.raises(InvalidConfigError, match=f"preset instant .*{named}"):
        compression_config(**{"preset": "instant", "ratio": 0.7, **settings})


def test_nothing_is_calibrated_by_the_preset_instant():
    config = compression_config(preset="instant", ratio=0.7)
    assert (config.calibrates, config.budget, config.measures_sensitivities) == (False, "bytes", False)
    assert set(config.kinds) == {"quantized", "entropy_coded"}
    assert compression_config(preset="instant", bits=4, engine="vllm").kinds == ("quantized",)
    assert compression_config(objective="prior", bits=4, preset="best").sequential is False
    assert compression_config(preset="instant", objective="fisher", bits=4).calibrates


def test_messages_have_no_words_of_the_validator():
    with pytest.raises(InvalidConfigError, match=r"^invalid compression settings: settings: export has the same entry"):
        compression_config(ratio=0.3, export=("dense", "dense"))


def test_all_problems_are_reported_at_once():
    with pytest.raises(InvalidConfigError, match=r"ratio.*samples"):
        compression_config(ratio=2, calibration={"samples": 0})


def test_settings_survive_json():
    config = compression_config(ratio=0.3, ignore=("*.q_proj",), calibration={"dataset": "builtin", "samples": 4})
    assert CompressionConfig.model_validate_json(config.model_dump_json()) == config


def test_settings_cannot_be_changed_afterwards():
    config = compression_config(ratio=0.3)
    with pytest.raises(ValueError, match="frozen"):
        config.ratio = 0.5


def test_the_default_preset_is_fast():
    plain = compression_config(ratio=0.3)
    assert plain.preset == "fast"
    assert plain == compression_config(ratio=0.3, preset="fast")
    # The fields' own defaults, which an OpenAPI document shows, are the same.
    fields = {name: field.default for name, field in CompressionConfig.model_fields.items() if name != "ratio"}
    assert {name: getattr(plain, name) for name in fields} == fields


@pytest.mark.parametrize("method", ["rocket-uniform", "svd-llm", "cospadi", "magnitude", "wanda"])
def test_baseline_methods_default_to_the_paper_preset(method):
    plain = compression_config(ratio=0.3, method=method)
    assert (plain.method, plain.preset, plain.importance_balance) == (method, "paper", 0.5)
    assert compression_config(ratio=0.3, method=method, preset="best").sequential


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_methods_of_one_format_have_a_default_format(method):
    plain = compression_config(method=method)
    assert (plain.preset, plain.budget, plain.code_bits, plain.group_size) == ("paper", "bytes", (4,), (32,))
    assert compression_config(method=method, code_bits=None, group_size=None) == plain
    assert compression_config(method=method, code_bits=8, group_size=0).group_size == (0,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "gptq", "ratio": 0.5}, "leave ratio out"),
        ({"method": "rtn", "target_bytes": 10}, "leave target_bytes out"),
        ({"method": "gptq", "bits": 4}, "code_bits, which .*leave bits out, which is for other methods"),
        ({"method": "gptq", "budget": "parameters"}, "budget must be bytes"),
        ({"method": "gptq", "code_bits": 9}, "code_bits.0: Input should be 2, 3, 4, 5, 6, 7 or 8"),
        ({"method": "gptq", "group_size": 16}, "group_size: Input should be 0, 32, 64 or 128"),
        ({"ratio": 0.5, "code_bits": 4}, "for the methods rtn and gptq"),
        ({"ratio": 0.5, "method": "wanda", "group_size": 32}, "for the methods rtn and gptq"),
        ({"method": "wanda"}, "compresses every layer at one ratio"),
        ({"method": ["gptq"]}, "method: Input should be"),
    ],
)
def test_a_format_is_for_methods_of_one_format(settings, said):
    with pytest.raises(InvalidConfigError, match=said):
        compression_config(**settings)


@pytest.mark.parametrize("preset", ["paper", "fast", "best"])
@pytest.mark.parametrize("objective", ["weight", "whitened", "fisher"])
def test_any_objective_works_with_any_preset(preset, objective):
    chosen = compression_config(ratio=0.3, preset=preset, objective=objective)
    assert (chosen.preset, chosen.objective) == (preset, objective)
    assert chosen.column_weights == (objective == "fisher" and preset != "paper")
    assert ("shared" in chosen.kinds) == (objective != "weight" and preset != "paper")


def test_contradictory_settings_are_refused():
    with pytest.raises(InvalidConfigError, match="column_weights"):
        compression_config(ratio=0.3, objective="whitened", column_weights=True)
    with pytest.raises(InvalidConfigError, match="shared"):
        compression_config(ratio=0.3, objective="weight", kinds=("shared",))


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(InvalidConfigError, match="preset"):
        compression_config(ratio=0.3, preset="bset")


def test_people_see_stages_by_other_names_than_programs():
    labels = [stage_label(stage) for stage in STAGES]
    assert labels[1:4] == ["checking the model", "measuring sensitivity", "profiling the layers"]
    assert stage_label("queued") == "queued"


@pytest.mark.parametrize("target", [{"target_bytes": 1000}, {"bits": 4.5}])
def test_a_target_in_bytes_allows_codes(target):
    asked = compression_config(**target, budget="parameters")
    assert (asked.budget, asked.quantizes) == ("bytes", True)
    assert not compression_config(**target, kinds=("sparse",)).quantizes


def test_a_ratio_allows_codes_if_it_is_one_of_bytes():
    assert not compression_config(ratio=0.5).quantizes
    assert compression_config(ratio=0.5, budget="bytes").quantizes


@pytest.mark.parametrize(
    ("settings", "profiles", "decides"),
    [
        ({"target_bytes": 10**6}, True, True),
        ({"target_bytes": 10**6, "include": ()}, False, False),
        ({"target_bytes": 10**6, "kinds": ("sparse",)}, False, False),
        ({"ratio": 0.5, "budget": "bytes"}, True, False),
        ({"ratio": 0.5, "budget": "bytes", "include": ("embeddings",)}, True, True),
        ({"bits": 4}, True, False),
        ({"ratio": 0.5}, False, False),
        ({"method": "gptq"}, False, False),
    ],
)
def test_embeddings_take_part_where_bytes_are_counted(settings, profiles, decides):
    config = CompressionConfig.model_validate(settings)
    assert (config.profiles_tables, config.decides_tables) == (profiles, decides)


@pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"method": "gptq"}, {"target_bytes": 1, "kinds": ("sparse",)}])
def test_embeddings_cannot_be_included_where_none_are_quantized(settings):
    with pytest.raises(ValidationError, match="include embeddings"):
        CompressionConfig.model_validate(settings | {"include": ("embeddings",)})


def test_an_engine_decides_kinds_exports_and_budget():
    config = compression_config(engine="vllm", ratio=0.7)
    assert (config.kinds, config.export, config.budget) == (("quantized",), ("compressed-tensors",), "bytes")
    assert config.quantizes
    assert not config.entropy_codes
    assert not config.profiles_tables


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kinds": ("quantized", "sparse", "low_rank")}, "engine vllm does not read sparse, low_rank"),
        ({"budget": "parameters"}, "the budget must count bytes"),
        ({"method": "wanda", "budget": "bytes"}, "method wanda makes layers that engine vllm does not read"),
        ({"include": ("embeddings",)}, "include embeddings"),
        ({"export": ("dense",), "ratio": None, "target_bytes": 10**6}, "a size of the compressed-tensors artifact"),
    ],
)
def test_what_an_engine_does_not_read_is_refused(settings, said):
    with pytest.raises(InvalidConfigError, match=said):
        compression_config(**({"engine": "vllm", "ratio": 0.5} | settings))


def test_an_export_of_another_engine_is_refused():
    with pytest.raises(InvalidConfigError, match="engine rocket does not read export compressed-tensors"):
        compression_config(ratio=0.5, export=("compressed-tensors",))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"storage": "memory"}, (32, 64, 0)),
        ({"storage": "memory", "group_size": (8,)}, (8,)),
        ({"storage": "memory", "engine": "vllm"}, (32, 64, 128, 0)),
    ],
)
def test_groups_suit_what_is_to_be_small(settings, expected):
    config = compression_config(bits=5.0, **settings)
    assert config.code_choices.group_sizes == expected
