"""Targets of a job: a ratio, a size, bits per weight, or only a profile."""

import re

import pytest

from rocket_client.errors import InvalidArgumentError, ProblemError


def only_job(client):
    [job] = client.list_jobs().data
    return job


def test_a_size_is_sent_in_bytes(remote, client):
    assert remote("submit", "local/tiny", "--size", "4MB").code == 0
    job = only_job(client)
    assert (job.kind, job.ratio, job.target_bytes) == ("compression", None, 4_000_000)
    assert "4.00 MB" in remote("jobs").out


def test_a_ratio_may_be_a_percentage(remote, client):
    assert remote("submit", "local/tiny", "--ratio", "30%").code == 0
    assert only_job(client).ratio == 0.3


def test_bits_are_sent(remote, client):
    assert remote("submit", "local/tiny", "--bits", "4.5").code == 0
    job = only_job(client)
    assert (job.kind, job.ratio, job.target_bytes, job.bits) == ("compression", None, None, 4.5)
    assert "≤ 4.5 bits" in remote("jobs").out


def test_a_memory_is_sent(remote, client):
    asked = ("--fit", "100MB", "--context", "1k", "--batch", "2", "--kv-bits", "8", "--for", "llama.cpp")
    outcome = remote("submit", "local/tiny", *asked)
    assert "a context of 1,024 tokens is longer than the" in outcome.err
    memory = ("--fit", "10.3MB", "--context", "16", "--batch", "2")
    told = remote("estimate", "local/tiny", *memory).out
    assert re.search(r"keys and values of 2 times 16 tokens +[\d.]+ kB\n.*Transformers.* MB\ntotal +10.30 MB", told)
    assert remote("submit", "local/tiny", *memory).code == 0
    job = only_job(client)
    assert (job.kind, job.ratio, job.fit.memory_bytes, job.fit.context) == ("compression", None, 10_300_000, 16)
    assert (job.fit.batch, job.fit.kv_bits) == (2, None)
    assert "in 10.30 MB" in remote("jobs").out


def test_bounds_on_the_loss_are_sent(remote, client):
    assert remote("submit", "local/tiny", "--max-kl", "0.02").code == 0
    assert remote("submit", "local/tiny", "--max-perplexity-increase", "2%", "--evaluate-samples", "5").code == 0
    relative, absolute = client.list_jobs().data
    assert (absolute.kind, absolute.ratio, absolute.max_kl, absolute.evaluate.dataset) == (
        "compression",
        None,
        0.02,
        "builtin",
    )
    assert (relative.max_kl, relative.max_perplexity_increase, relative.evaluate.samples) == (None, 0.02, 5)
    listed = remote("jobs").out
    assert "KL ≤ 0.02" in listed
    assert "perplexity ≤ +2.0%" in listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "specify exactly one"),
        (("--ratio", "0.3", "--size", "1GB"), "specify exactly one"),
        (("--bits", "3", "--size", "1GB"), "--bits, --fit, --max-kl or --max-perplexity-increase: specify exactly one"),
        (("--bits", "4", "--method", "gptq"), "--bits: is for the method rocket; gptq takes --code-bits"),
        (("--ratio", "30"), "to remove 30 %, use 0.3 or 30%"),
        (("--ratio", "third"), "is not a valid number; use for example 0.3 or 30%"),
        (("--ratio", "130%"), "less than 1"),
        (("--bits", "many"), "valid number"),
        (("--bits", "0"), "greater than 0"),
        (("--bits", "40"), "less than or equal to 16"),
        (("--size", "much"), "is not a size"),
        (("--fit", "1GB", "--size", "1GB"), "specify exactly one"),
        (("--fit", "1GB"), "--fit: depends on the context; add --context, such as --context 32k"),
        (("--size", "1GB", "--kv-bits", "8"), "--kv-bits: is about a memory; add --fit, such as --fit 24GB"),
        (("--fit", "1GB", "--context", "0"), "'0' is not a number of tokens; use for example 32k"),
        (("--fit", "1GB", "--context", "32q"), "'32q' is not a number of tokens"),
        (("--fit", "1GB", "--context", "9", "--kv-bits", "5"), "fit.kv_bits: Input should be 4, 8 or 16"),
        (("--fit", "1GB", "--context", "9", "--batch", "0"), "fit.batch: Input should be greater than or equal to 1"),
        (("--max-kl", "0"), "greater than 0"),
        (("--max-kl", "0.1", "--size", "1MB"), "specify exactly one"),
        (("--max-perplexity-increase", "2"), "for 2 %, write 0.02"),
        (("--max-kl", "0.1", "--heal", "1M"), "heal the result, or give a size"),
    ],
)
def test_wrong_targets_are_refused_before_sending(remote, client, arguments, said):
    outcome = remote("submit", "local/tiny", *arguments)
    assert outcome.code == 2
    assert said in " ".join(outcome.err.replace("│", " ").split())
    assert client.list_jobs().data == ()


def test_a_model_can_be_profiled_alone(remote, client):
    outcome = remote("profile", "local/tiny", "--samples", "3", "--metadata", "a=b", "--ignore", "*.down_proj")
    job = only_job(client)
    assert (outcome.code, outcome.out) == (0, f"{job.id}\n")
    assert (job.kind, job.ratio, job.target_bytes) == ("profile", None, None)
    assert (job.calibration.samples, job.metadata, job.options["ignore"]) == (3, {"a": "b"}, ["*.down_proj"])
    assert "profile" in remote("jobs").out
    assert remote("profile", "local/tny").code == 3


def test_a_method_of_one_format_needs_no_number(remote, client):
    options = ("--method", "gptq", "--code-bits", "3", "--group-size", "64")
    assert remote("submit", "local/tiny", *options).code == 0
    job = only_job(client)
    assert (job.kind, job.ratio, job.target_bytes) == ("compression", None, None)
    assert (job.options["method"], job.options["code_bits"], job.options["group_size"]) == ("gptq", 3, 64)
    assert "3 bits" in remote("jobs").out


@pytest.mark.both_clients
def test_both_clients_require_exactly_one_target(connect, server):
    with connect(server.url) as rocket:
        for wrong in ({}, {"ratio": 0.3, "target_bytes": 9}, {"ratio": float("nan")}, {"bits": 4, "ratio": 0.3}):
            for ask in (rocket.submit, rocket.estimate):
                with pytest.raises(InvalidArgumentError, match="ratio"):
                    ask("local/tiny", **wrong)
        with pytest.raises(InvalidArgumentError, match="above 0 and up to 16"):
            rocket.submit("local/tiny", bits=float("inf"))
        with pytest.raises(ProblemError, match="a ratio of 0 removes nothing"):
            rocket.submit("local/tiny", ratio=0)
        assert rocket.submit("local/tiny", bits=4).bits == 4
        assert rocket.estimate("local/tiny", bits=8).ratio == 0.5
        assert rocket.submit("local/tiny", max_kl=0.1).max_kl == 0.1
        assert "sizes are tried" in rocket.estimate("local/tiny", max_kl=0.1).seconds_unknown
        fit = {"memory_bytes": 10_300_000, "context": 16}
        with pytest.raises(InvalidArgumentError, match="specify only one of ratio, target_bytes, bits, fit"):
            rocket.submit("local/tiny", fit=fit, bits=4)
        assert rocket.submit("local/tiny", fit=fit).fit.context == 16
        assert 0 < rocket.estimate("local/tiny", fit=fit).fit.weights_bytes < 10_300_000
        assert rocket.profile("local/tiny").kind == "profile"
        assert rocket.estimate("local/tiny", target_bytes=4_000_000).ratio > 0
        assert rocket.submit("local/tiny", options={"method": "rtn"}).options["code_bits"] == 4
        assert rocket.estimate("local/tiny", options={"method": "rtn"}).ratio == 1 - 4.5 / 16
