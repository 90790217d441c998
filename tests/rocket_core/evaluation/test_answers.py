import json
import math

import pytest
import torch
from transformers import GenerationConfig

from rocket_core.errors import CheckpointFormatError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.evaluation import Measurement, compare_models, load_model, open_model, read_prompts
from rocket_core.evaluation.answers import first_difference, greedy_answer, token_texts
from rocket_core.report.answers import ComparedAnswer, pieces_after, pieces_before
from tests.reference.encoders import save_bert
from tests.reference.hostile_models import edit_json
from tests.reference.language_models import divergence_of, next_logits
from tests.reference.tiny_models import byte_tokenizer, save_tiny_model
from tests.rocket_core.evaluation.test_comparison import save_disturbed, windows_of

CPU = torch.device("cpu")
PROMPTS = ("The dict type", "é")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    dense = save_tiny_model("llama", tmp_path_factory.mktemp("dense"))
    return open_model(dense), open_model(save_disturbed(tmp_path_factory.mktemp("other"), 0.05))


@pytest.fixture
def answer(tmp_path):
    """Compare the answers of two models; the scratch folder must be empty afterwards."""

    def run(before, after, texts=PROMPTS, count=6, on_step=lambda *_: None):
        prompts = read_prompts(before, texts, count)
        how = Measurement(text=windows_of(8, 8), prompts=prompts, answer_tokens=count, device=CPU)
        answers = compare_models(before, after, how, scratch=tmp_path, on_step=on_step).answers
        assert list(tmp_path.iterdir()) == []
        return prompts, answers

    return run


def greedy(model, tokens, count):
    """Return a greedy answer, computed from the whole text for every token."""
    text = list(tokens)
    for _ in range(count):
        logits = next_logits(model, text)
        text.append(logits.index(max(logits)))
    return text[len(tokens) :]


def test_answers_equal_token_by_token_predictions(answer, folders):
    prompts, answers = answer(*folders)

    models = [load_model(folder, CPU) for folder in folders]
    for prompt, compared in zip(prompts, answers, strict=True):
        read = prompt.tokens.tolist()
        before, after = (greedy(model, read, 6) for model in models)
        assert [len(compared.before), len(compared.after)] == [6, 6]
        assert compared.first_difference == next(i for i in range(6) if before[i] != after[i])
        for at, token in enumerate(compared.before):
            left, right = (next_logits(model, read + before[:at]) for model in models)
            assert token.kl_divergence == pytest.approx(divergence_of(left, right), rel=1e-4)
            assert token.before == pytest.approx(_softmax(left)[before[at]], rel=1e-4)
            assert token.after == pytest.approx(_softmax(right)[before[at]], rel=1e-4)


def _softmax(logits):
    total = math.fsum(map(math.exp, logits))
    return [math.exp(value) / total for value in logits]


def test_a_model_answers_as_itself(answer, folders):
    _, answers = answer(folders[0], folders[0])
    for compared in answers:
        assert compared.first_difference is None
        assert [token.text for token in compared.before] == list(compared.after)
        assert [token.kl_divergence for token in compared.before] == [0] * 6
        assert "the same answer" in compared.summary


def test_an_answer_ends_with_a_stop_token_only(folders):
    model = load_model(folders[0], CPU)
    prompt = torch.tensor([5, 6, 7])
    free = greedy_answer(model, prompt, count=8, stops=())
    stop = int(free[2])
    stopped = greedy_answer(model, prompt, count=8, stops=(stop,))
    assert stopped.tolist() == free.tolist()[: free.tolist().index(stop) + 1]


def test_penalties_of_the_folder_do_not_apply(folders):
    model = load_model(folders[0], CPU)
    prompt = torch.tensor([5, 6, 7])
    expected = greedy_answer(model, prompt, count=8, stops=())
    model.generation_config = GenerationConfig(repetition_penalty=50.0, do_sample=True, bad_words_ids=[[5]])
    assert greedy_answer(model, prompt, count=8, stops=()).tolist() == expected.tolist()


def test_a_decoder_that_claims_to_be_a_pair_is_refused(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    edit_json(folder / "config.json", is_encoder_decoder=True)
    with pytest.raises(UnsupportedArchitectureError, match="neither predicts the tokens of a text nor"):
        open_model(folder)


def test_a_chat_template_makes_the_prompt_a_message(tmp_path, folders):
    folder = save_tiny_model("llama", tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}!"
    tokenizer.save_pretrained(folder)
    [chat] = read_prompts(open_model(folder), ["hi"], 4)
    [plain] = read_prompts(folders[0], ["<user>hi!"], 4)
    assert chat.is_chat
    assert not plain.is_chat
    assert chat.tokens.tolist() == plain.tokens.tolist()


def test_a_chat_template_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("rocket_core.evaluation.answers.TEMPLATE_SECONDS", 0.2)
    folder = save_tiny_model("llama", tmp_path)
    tokenizer = byte_tokenizer()
    loops = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template = loops
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointFormatError, match=r"the chat template of .* took more than 0 seconds of processor"):
        read_prompts(open_model(folder), ["hi"], 4)


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ raise_exception('no user') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 / 0 }}"],
)
def test_a_chat_template_that_cannot_be_used_is_named(tmp_path, template):
    folder = save_tiny_model("llama", tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointFormatError, match="the chat template of"):
        read_prompts(open_model(folder), ["hi"], 4)


def test_parts_of_a_character_belong_to_the_last_token():
    tokenizer = byte_tokenizer()
    prompt, text = tokenizer("a")["input_ids"], tokenizer("é!")["input_ids"]
    texts = token_texts(tokenizer, torch.tensor(prompt), torch.tensor(text))
    assert "".join(texts) == "é!"
    assert texts == ["", "é", "!"]


@pytest.mark.parametrize(
    ("one", "other", "expected"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([4], [5], 0)]
)
def test_the_first_difference(one, other, expected):
    assert first_difference(torch.tensor(one), torch.tensor(other)) == expected


def test_a_prompt_must_leave_room_for_an_answer(folders):
    longest = folders[0].config.max_position_embeddings
    with pytest.raises(InvalidConfigError, match=r"prompt 2 has .* shorten the prompt or lower answer_tokens"):
        read_prompts(folders[0], ["a", "a" * longest], 4)


def test_an_encoder_answers_no_prompts(tmp_path):
    with pytest.raises(InvalidConfigError, match="leave prompts out"):
        read_prompts(open_model(save_bert(tmp_path)), ["hi"], 4)


def test_progress_rises_through_the_answers(answer, folders):
    told = []
    answer(*folders, on_step=lambda share, what: told.append((share, what)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert (shares[-1], told[-1][1]) == (1, "compressed, answers")


def test_texts_of_tokens_are_cut(answer, folders, tmp_path_factory):
    long = save_tiny_model("llama", tmp_path_factory.mktemp("long"))
    decoder = json.loads((long / "tokenizer.json").read_text())["decoder"]
    replace = {"type": "Replace", "pattern": {"Regex": "."}, "content": "e" * 20_000}
    edit_json(long / "tokenizer.json", decoder={"type": "Sequence", "decoders": [decoder, replace]})
    _, [compared] = answer(open_model(long), folders[1], texts=["The dict"])
    for texts in ([token.text for token in compared.before], compared.after):
        assert max(texts, key=len) == "e" * 255 + "…"


def test_an_answer_has_a_longest_text():
    token = {"text": "abc" * 50, "before": 1.0, "after": 1.0, "kl_divergence": 0.0}
    compared = ComparedAnswer(
        prompt="p", is_chat=False, before=[token] * 200, after=["abc" * 50] * 200, first_difference=None
    )
    for texts in ([token.text for token in compared.before], compared.after):
        assert len("".join(texts)) == 2**14
        assert "".join(texts).endswith("…")
        assert texts[-1] == ""


def test_pieces_mark_where_the_answers_part(answer, folders):
    _, [compared, _] = answer(*folders)
    for pieces in (list(pieces_before(compared)), list(pieces_after(compared))):
        marked = [index for index, piece in enumerate(pieces) if piece.is_first_difference]
        assert marked == [compared.first_difference]
