"""Messages of the API as the terminal shows them."""

import pytest

from rocket_cli.command_words import command_words, plain_message, taken_for_a_value


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no job has this id; GET /jobs lists yours", "no job has this id; `rocket jobs` lists yours"),
        ("GET /jobs/job_1/artifacts lists the files", "`rocket download` lists the files"),
        ("see GET /webhooks and GET /models", "see `rocket webhooks list` and `rocket models`"),
        ("poll GET /jobs/{id}, or wait", "poll GET /jobs/{id}, or wait"),
        ("GET /models/NAME lists its files", "GET /models/NAME lists its files"),
        ("documented in GET /openapi.json", "documented in GET /openapi.json"),
        ("the disk is full", "the disk is full"),
    ],
)
def test_requests_are_named_as_commands(message, shown):
    assert command_words(message) == shown


def test_a_refusal_names_the_command(remote):
    refused = remote("submit", "local/gone", "--ratio", "0.3").err
    assert "`rocket models` lists those it has" in refused
    assert "GET /" not in refused


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "Value error, 'bst' is not one of 'fast', 'best'.",
            "'bst' is not one of 'fast', 'best'. Did you mean 'best'?",
        ),
        (
            "Value error, 'Ollama' is not one of 'vllm', 'llama.cpp'.",
            "'Ollama' is not one of 'vllm', 'llama.cpp'. Did you mean 'llama.cpp'?",
        ),
        ("'xyz' is not one of 'fast', 'best'.", "'xyz' is not one of 'fast', 'best'."),
        ("Missing argument 'MODEL'.", "Missing argument 'MODEL'."),
    ],
)
def test_a_misspelled_choice_is_answered_with_the_nearest(message, shown):
    assert plain_message(message) == shown


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["compress", "m", "--evaluate", "--heal", "20"], ("--evaluate", "--heal")),
        (["compress", "m", "--evaluate", "--json"], ("--evaluate", "--json")),
        (["compress", "m", "--evaluate", "builtin", "--heal", "20", "--json"], None),
        (["compress", "m", "--json", "--heal", "20"], None),
        (["compress", "m", "--evaluate", "--no-option"], None),
        (["compress", "--evaluate"], None),
        ([], None),
    ],
    ids=str,
)
def test_an_option_taken_for_the_value_of_another_is_found(arguments, found):
    said = taken_for_a_value(arguments, ["--evaluate", "--heal"], ["--evaluate", "--heal", "--json"])
    assert said == (found and f"Option '{found[0]}' needs a value, and '{found[1]}' was taken for it.")
