"""Targets: one type inside, two nullable members at each boundary."""

import pytest

from app.shared.requests import AllocationRequest, CompressionRequest, JobRequest, ProfileRequest
from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InvalidConfigError
from rocket_core.target import ByBytes, ByError, ByFormat, ByRatio, target_of

BOUNDARIES = [
    ({"ratio": 0.3}, ByRatio(ratio=0.3)),
    ({"ratio": 0.0}, ByRatio(ratio=0.0)),
    ({"target_bytes": 1000}, ByBytes(target_bytes=1000)),
    ({}, None),
]
FORMATS = [
    ({"method": "gptq"}, ByFormat(bits=4, group_size=32), "4 bits, groups of 32"),
    ({"method": "rtn", "code_bits": 3, "group_size": 0}, ByFormat(bits=3, group_size=0), "3 bits, a scale per output"),
]


@pytest.mark.parametrize(("members", "target"), BOUNDARIES)
def test_two_members_become_one_target(members, target):
    assert target_of(members.get("ratio"), members.get("target_bytes")) == target


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


def test_a_ratio_and_a_size_are_not_both_a_target():
    both = {"ratio": 0.3, "target_bytes": 1000}
    with pytest.raises(ValueError, match="either ratio or target_bytes"):
        target_of(**both)
    with pytest.raises(InvalidConfigError, match="either ratio or target_bytes"):
        compression_config(**both)
    with pytest.raises(ValueError, match="either ratio or target_bytes"):
        CompressionRequest.model_validate({"model_id": "local/m"} | both)


@pytest.mark.parametrize(
    ("members", "target"),
    [
        ({"ratio": 0.0}, ByRatio(ratio=0.0)),
        ({"model_bytes": 0}, ByBytes(target_bytes=0)),
        ({"error": 0.0}, ByError(error=0.0)),
    ],
)
def test_a_prediction_has_one_target_of_three(members, target):
    assert AllocationRequest.model_validate(members).target == target
