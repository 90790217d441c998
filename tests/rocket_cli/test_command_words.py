"""Messages of the API as the terminal shows them."""

import pytest

from rocket_cli.command_words import command_words, plain_message


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
