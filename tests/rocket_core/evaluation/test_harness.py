import importlib.util
import json
from pathlib import Path

import pytest
import torch

from rocket_core.config import HUB_TASKS
from rocket_core.errors import HubUnavailableError, InvalidConfigError
from rocket_core.evaluation.harness import _folders, load_tasks, score_tasks
from rocket_core.report.quality import TaskScore
from tests.reference.language_models import next_logits, surprise_of
from tests.reference.tiny_models import build_llama, byte_tokenizer

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"

QUESTIONS = [
    {"context": "The sky is", "choices": [" blue", " a rather long green", " no"], "gold": 1},
    {"context": "Two and two", "choices": [" make four", " five"], "gold": 1, "id": 7},
    {"context": "A dog", "choices": [" barks", " is", " meows loudly", " or"], "gold": 2},
    {"context": "Once", "choices": [" upon a time", " x"], "gold": 0},
    {"context": "It is", "choices": [" it", " that other one", " Größe"], "gold": 2},
]
CLOZES = [{"context": "One day a", "continuation": text} for text in (" dog", " cat", " of", "\x00", " a")]


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "questions.jsonl", QUESTIONS)


def log_likelihood(model, context, continuation):
    """Return log p(continuation | context) and whether each token is the likeliest, token by token."""
    tokenizer = byte_tokenizer()
    tokens, total, greedy = tokenizer(context)["input_ids"], 0.0, True
    for token in tokenizer(continuation)["input_ids"]:
        logits = next_logits(model, tokens)
        total -= surprise_of(logits, token)
        greedy = greedy and logits.index(max(logits)) == token
        tokens = [*tokens, token]
    return total, greedy


def accuracies(model, items):
    """Return accuracy by log-likelihood, and by log-likelihood per byte."""
    right = normalised = 0
    for item in items:
        scores = [log_likelihood(model, item["context"], choice)[0] for choice in item["choices"]]
        lengths = [len(choice) for choice in item["choices"]]
        by_length = [score / length for score, length in zip(scores, lengths, strict=True)]
        right += scores.index(max(scores)) == item["gold"]
        normalised += by_length.index(max(by_length)) == item["gold"]
    return right / len(items), normalised / len(items)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accuracies_of_five_questions_match_a_manual_count(questions, seed):
    pytest.importorskip("lm_eval")
    model = build_llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape, generator=torch.manual_seed(seed)))
    right, normalised = accuracies(model, QUESTIONS)

    scores = score_tasks(model, byte_tokenizer(), load_tasks([questions]), items=None, batch_size=2)

    assert scores == (
        TaskScore(task="questions", metric="acc", value=right, items=5),
        TaskScore(task="questions", metric="acc_norm", value=normalised, items=5),
    )


def test_the_questions_distinguish_the_two_accuracies():
    right, normalised = accuracies(build_llama(), QUESTIONS)
    assert 0 < right != normalised > 0


def test_a_continuation_counts_if_all_its_tokens_are_likeliest(tmp_path):
    pytest.importorskip("lm_eval")
    model, tokenizer = build_llama(), byte_tokenizer()
    prefix = tokenizer("One day a")["input_ids"]
    logits = next_logits(model, prefix)
    likeliest = tokenizer.decode([logits.index(max(logits))])
    items = [*CLOZES, {"context": "One day a", "continuation": likeliest}]
    expected = sum(log_likelihood(model, item["context"], item["continuation"])[1] for item in items) / len(items)

    scores = score_tasks(
        model, tokenizer, load_tasks([write(tmp_path / "cloze.jsonl", items)]), items=None, batch_size=4
    )

    assert scores == (TaskScore(task="cloze", metric="acc", value=expected, items=6),)
    assert expected > 0


def test_a_limit_takes_the_first_items_and_tasks_are_reusable(questions):
    pytest.importorskip("lm_eval")
    model, tasks = build_llama(), load_tasks([questions])

    first = score_tasks(model, byte_tokenizer(), tasks, items=2, batch_size=8)
    again = score_tasks(model, byte_tokenizer(), tasks, items=None, batch_size=8)

    assert [score.value for score in first] == list(accuracies(model, QUESTIONS[:2]))
    assert [score.value for score in again] == list(accuracies(model, QUESTIONS))


def test_the_caller_can_stop_it_and_no_hook_is_left(questions, capfd):
    pytest.importorskip("lm_eval")

    class EnoughError(Exception):
        pass

    def enough(_done, _total):
        raise EnoughError

    model = build_llama()
    with pytest.raises(EnoughError):
        score_tasks(model, byte_tokenizer(), load_tasks([questions]), items=None, batch_size=1, on_progress=enough)
    assert not model._forward_pre_hooks

    calls = []
    score_tasks(
        model,
        byte_tokenizer(),
        load_tasks([questions]),
        items=None,
        batch_size=1,
        on_progress=lambda *call: calls.append(call),
    )
    choices = sum(len(question["choices"]) for question in QUESTIONS)
    assert calls == [(done, choices) for done in range(choices)]
    # Another program may read the standard output of this one.
    assert capfd.readouterr() == ("", "")


def test_without_the_harness_the_extra_is_named(questions, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "rocket_core.evaluation.harness.find_spec", lambda name: None if name == "lm_eval" else find_spec(name)
    )
    with pytest.raises(InvalidConfigError, match=r"pip install 'rocket-compress\[evaluation\]'"):
        load_tasks([questions])
    assert load_tasks([]) == ()


@pytest.mark.parametrize("name", ["unknown_task", "missing.jsonl", "/etc/passwd", "."])
def test_an_unknown_task_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidConfigError, match=r"arc_easy.*\.jsonl"):
        load_tasks([name])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("CANARY", "not a JSON object"),
        ("[]", "not an item of a task"),
        ('{"context": "CANARY"}', "either choices or continuation"),
        ('{"context": "a", "choices": ["b", "c"], "continuation": "d", "gold": 0}', "either choices or continuation"),
        ('{"context": "a", "choices": ["CANARY", "c"]}', "gold"),
        ('{"context": "a", "choices": ["b", "c"], "gold": 2}', "gold"),
        ('{"context": "a", "choices": ["b"], "gold": 0}', "choices"),
        ('{"context": "a", "choices": ["b", ""], "gold": 0}', "choices.1"),
        ('{"context": "a", "continuation": ""}', "continuation"),
        ('{"continuation": "CANARY"}', "context"),
    ],
)
def test_a_malformed_item_is_refused_by_line_without_its_text(tmp_path, line, problem):
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps(QUESTIONS[0]) + "\n\n" + line + "\n")

    with pytest.raises(InvalidConfigError, match=f"line 3.*{problem}") as refused:
        load_tasks([str(file)])
    assert "CANARY" not in str(refused.value)


@pytest.mark.parametrize(("items", "problem"), [([], "no item"), ([QUESTIONS[0], CLOZES[0]], "both")])
def test_a_file_must_have_items_of_one_kind(tmp_path, items, problem):
    with pytest.raises(InvalidConfigError, match=problem):
        load_tasks([write(tmp_path / "task.jsonl", items)])


def test_two_tasks_with_one_name_are_refused(tmp_path, questions):
    (tmp_path / "other").mkdir()
    with pytest.raises(InvalidConfigError, match="two tasks are called questions"):
        load_tasks([questions, write(tmp_path / "other" / "questions.jsonl", QUESTIONS)])


def test_the_harness_has_every_task_offered_by_name():
    tasks = pytest.importorskip("lm_eval.tasks")
    manager = tasks.TaskManager(include_defaults=False, include_path=_folders(HUB_TASKS))
    assert set(HUB_TASKS) <= set(manager.all_tasks)


def test_unavailable_hub_items_are_an_error_naming_the_task(monkeypatch):
    pytest.importorskip("lm_eval")

    def refuse(*_arguments, **_options):
        raise ConnectionError("CANARY")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(HubUnavailableError, match="arc_easy") as refused:
        load_tasks(["arc_easy"])
    assert "CANARY" not in str(refused.value)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the data beside the repository")
def test_real_items_have_both_kinds():
    pytest.importorskip("lm_eval")
    files = [str(SHARED_DATA / "tasks" / name) for name in ("arc_easy.jsonl", "lambada_openai.jsonl")]

    scores = score_tasks(build_llama(), byte_tokenizer(), load_tasks(files[:1]), items=3, batch_size=16)

    assert [(score.task, score.metric, score.items) for score in scores] == [
        ("arc_easy", "acc", 3),
        ("arc_easy", "acc_norm", 3),
    ]
    assert load_tasks(files)[1].name == "lambada_openai"
