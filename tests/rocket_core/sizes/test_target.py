"""Targets: one type inside, several nullable members at each boundary."""

import math

import pytest

from app.shared.requests import AllocationRequest, CompressionRequest, JobRequest, ProfileRequest
from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InvalidConfigError
from rocket_core.sizes.target import ByBits, ByBytes, ByError, ByFormat, ByLoss, ByRatio, parse_size, target_of

BOUNDARIES = [
    ({"ratio": 0.3}, ByRatio(ratio=0.3)),
    ({"ratio": 0.0}, ByRatio(ratio=0.0)),
    ({"target_bytes": 1000}, ByBytes(target_bytes=1000)),
    ({"bits": 4}, ByBits(bits=4.0)),
    ({"bits": 4.5}, ByBits(bits=4.5)),
    ({"max_kl": 0.02}, ByLoss(measure="max_kl", bound=0.02)),
    ({"max_perplexity_increase": 0.02}, ByLoss(measure="max_perplexity_increase", bound=0.02)),
    ({}, None),
]
FORMATS = [
    ({"method": "gptq"}, ByFormat(bits=4, group_size=32), "4 bits, groups of 32"),
    ({"method": "rtn", "code_bits": 3, "group_size": 0}, ByFormat(bits=3, group_size=0), "3 bits, a scale per output"),
]


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_members_become_one_target(members, target):
    assert target_of(members) == target_of({"ratio": None, "bits": None} | members) == target


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_settings_have_the_target_of_their_members(members, target):
    config = compression_config(**members)
    assert config.target == target
    assert CompressionConfig.model_validate_json(config.model_dump_json()).target == target
    assert "target" not in config.model_dump()


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_a_request_has_the_target_of_its_members(members, target):
    request = JobRequest.model_validate({"model_id": "local/m"} | members)
    assert request.target == request.compression_config().target == target
    assert request.kind == ("profile" if target is None else "compression")
    assert "target" not in request.model_dump()


def test_a_bound_on_the_loss_is_in_nats():
    assert ByLoss(measure="max_kl", bound=0.02).nats == 0.02
    assert ByLoss(measure="max_perplexity_increase", bound=0.02).nats == pytest.approx(math.log(1.02))
    texts = ("KL divergence of at most 0.02 nats per token", "perplexity increase of at most 2 %")
    measures = ("max_kl", "max_perplexity_increase")
    assert tuple(ByLoss(measure=measure, bound=0.02).text for measure in measures) == texts


@pytest.mark.parametrize(("options", "target", "text"), FORMATS)
def test_a_method_of_one_format_has_that_target(options, target, text):
    config = compression_config(**options)
    assert config.target == target
    assert CompressionConfig.model_validate_json(config.model_dump_json()) == config
    request = CompressionRequest.model_validate({"model_id": "local/m", "options": options})
    assert (request.target, request.kind, target.text) == (target, "compression", text)
    with pytest.raises(ValueError, match="needs no profile"):
        ProfileRequest.model_validate({"model_id": "local/m", "options": options})


@pytest.mark.parametrize(("group_size", "of_20", "of_100"), [(0, 20, 100), (32, 20, 32), (128, 20, 100)])
def test_groups_have_at_most_all_inputs(group_size, of_20, of_100):
    target = ByFormat(bits=4, group_size=group_size)
    assert [target.code_format(d_in).group_size for d_in in (20, 100)] == [of_20, of_100]


FIT = {"memory_bytes": 10**9, "context": 1000}


@pytest.mark.parametrize("missing", ["ratio", "target_bytes", "bits", "fit", "max_kl", None])
def test_more_than_one_target_is_refused(missing):
    several = {"ratio": 0.3, "target_bytes": 1000, "bits": 4.5, "max_kl": 0.1, "fit": FIT}
    several.pop(missing, None)
    with pytest.raises(ValueError, match="only one of ratio, target_bytes, bits, fit, max_kl"):
        target_of(several)
    with pytest.raises(InvalidConfigError, match="only one of ratio, target_bytes, bits, fit, max_kl"):
        compression_config(**several)
    with pytest.raises(ValueError, match="only one of ratio, target_bytes, bits, fit, max_kl"):
        CompressionRequest.model_validate({"model_id": "local/m"} | several)


def test_bits_are_said_as_they_were_typed():
    assert [ByBits(bits=bits).text for bits in (4.0, 4.5, 2.0625)] == [
        "4 bits per weight",
        "4.5 bits per weight",
        "2.0625 bits per weight",
    ]


@pytest.mark.parametrize(
    ("members", "target"),
    [
        ({"ratio": 0.0}, ByRatio(ratio=0.0)),
        ({"model_bytes": 0}, ByBytes(target_bytes=0)),
        ({"bits": 4.5}, ByBits(bits=4.5)),
        ({"error": 0.0}, ByError(error=0.0)),
    ],
)
def test_a_prediction_has_one_target_of_four(members, target):
    assert AllocationRequest.model_validate(members).target == target


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5 GB", 1_500_000_000), ("700MiB", 700 * 2**20), ("2800000", 2_800_000), (".5kB", 500), ("1B", 1)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("50%", "or give a ratio: 50% is removed then"),
        ("3", "3 without a unit is a number of bytes; write for example 3MB or 3GB"),
        ("much", "'much' is not a size; use a number of bytes"),
        ("3MB/2", "is not a size"),
        ("3 apples", "is not a size"),
        ("", "is not a size"),
    ],
)
def test_what_is_no_size_is_answered_with_one(text, said):
    with pytest.raises(ValueError, match=said):
        parse_size(text)
