"""Chats as calibration data: rendering, windows and skipped rows."""

import json
from pathlib import Path

import datasets as hub
import pytest

from rocket_core.calibration.chats import RowReader
from rocket_core.calibration.datasets import document_windows, documents, file_documents
from rocket_core.calibration.inputs import DecoderText, EncoderText
from rocket_core.config import CalibrationConfig
from rocket_core.errors import CalibrationError, CheckpointFormatError, EmptyCalibrationError, InvalidConfigError
from rocket_core.inspection.files.dataset_names import hub_dataset_name, is_hub_dataset
from tests.reference.tiny_models import byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for message in messages %}"
    "{% if message.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
)
CHAT = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]}
ALIEN = {"messages": [{"role": "alien", "content": "Hi"}]}


def chat_tokenizer(template: str | None = TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def write(tmp_path: Path):
    def written(*rows: dict) -> str:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


class TestRendering:
    def test_the_models_own_template_renders_system_prompt_and_tools(self, write):
        tools = [{"type": "function", "function": {"name": "f"}}]
        path = write(CHAT, CHAT | {"tools": tools}, {"text": "plain"})
        texts = list(file_documents(Path(path), RowReader(tokenizer=chat_tokenizer())))
        # Windows put the BOS token before each text.
        assert texts == ["<system>S<user>Hi", "[f]<system>S<user>Hi", "plain"]

    @pytest.mark.parametrize("reader", [None, RowReader(tokenizer=chat_tokenizer(None))])
    def test_a_chat_without_a_template_is_refused_by_row(self, write, reader: RowReader | None):
        with pytest.raises(CalibrationError, match=r"line 2 is a chat, and the model has no chat template"):
            list(documents(write({"text": "a"}, CHAT), seed=0, reader=reader))

    def test_a_template_that_fails_names_the_row(self, write):
        reader = RowReader(tokenizer=chat_tokenizer())
        with pytest.raises(CalibrationError, match=r"line 2 with the model's chat template.*no aliens.*correct"):
            list(documents(write(CHAT, ALIEN), seed=0, reader=reader))

    def test_a_template_that_does_not_return_is_not_skipped(self, write, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("rocket_core.calibration.chats.TEMPLATE_SECONDS", 0.2)
        loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
        reader = RowReader(tokenizer=chat_tokenizer(loops), skip_bad_rows=True)
        with pytest.raises(CheckpointFormatError, match="line 1 with the model's chat template took more than"):
            list(documents(write(CHAT), seed=0, reader=reader))

    def test_bad_rows_are_skipped_and_counted_if_asked(self, write):
        path = write(CHAT, {"other": 1}, ALIEN, {"text": "plain"})
        reader = RowReader(tokenizer=chat_tokenizer(), skip_bad_rows=True)
        assert sorted(documents(path, seed=0, reader=reader)) == ["<system>S<user>Hi", "plain"]
        assert reader.skipped == 2
        with pytest.raises(CalibrationError, match="line 2 has no string"):
            list(documents(path, seed=0, reader=RowReader(tokenizer=chat_tokenizer())))

    def test_a_file_of_bad_rows_alone_holds_no_text(self, write):
        with pytest.raises(EmptyCalibrationError, match="holds no text"):
            list(documents(write({"other": 1}), seed=0, reader=RowReader(skip_bad_rows=True)))

    def test_a_folder_of_texts_is_cut_into_passages(self, tmp_path: Path):
        for name in ("a.txt", "b.md"):
            (tmp_path / name).write_text("\n\n".join([name * 1000] * 4))
        assert len(list(documents(str(tmp_path), seed=0))) == 4


class TestWindows:
    def draw(self, path: str, **settings):
        source = DecoderText(tokenizer=chat_tokenizer(), length=12)
        return source.draw(CalibrationConfig(dataset=path, **settings))

    def test_each_conversation_is_a_window_without_packing(self, write):
        path = write({"text": "abc"}, {"text": "x" * 50}, {"text": ""}, {"other": 1})
        inputs = self.draw(path, pack=False, skip_bad_rows=True)
        ids = byte_tokenizer()
        expected = [[1, *ids("abc", add_special_tokens=False)["input_ids"]]]
        expected += [[1, *ids("x" * 11, add_special_tokens=False)["input_ids"]]]
        assert sorted(tensor[0].tolist() for tensor in inputs.token_ids) == sorted(expected)
        assert inputs.positions(12) == 4 + 12
        assert inputs.rows.skipped == 1

    def test_samples_limit_the_windows(self, write):
        path = write(*({"text": f"text {number}"} for number in range(9)))
        assert len(self.draw(path, pack=False, samples=4)) == 4

    def test_texts_without_two_tokens_fill_no_window(self):
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = None
        with pytest.raises(EmptyCalibrationError, match="no text has two tokens"):
            document_windows(["", "a"], tokenizer, count=2, length=4)

    def test_an_encoder_refuses_windows_of_their_own_length(self, write):
        source = EncoderText(tokenizer=byte_tokenizer("<s> $A </s>"), length=8)
        with pytest.raises(InvalidConfigError, match="pack is false"):
            source.draw(CalibrationConfig(dataset=write({"text": "abc"}), pack=False))


class TestHub:
    def test_a_data_set_is_named_with_its_split(self):
        parts = hub_dataset_name("org/name:train_sft")
        assert parts is not None
        assert (parts.repository, parts.config, parts.split) == ("org/name", None, "train_sft")
        parts = hub_dataset_name("org/name/main:test")
        assert parts is not None
        assert (parts.repository, parts.config, parts.split) == ("org/name", "main", "test")

    @pytest.mark.parametrize("name", ["org/name", "name:train", "org/../name:train", "org/name:train[:1]", "/a/b:c"])
    def test_other_names_are_not_on_the_hub(self, name: str):
        assert not is_hub_dataset(name)

    def test_rows_of_a_named_data_set_are_read_as_local_ones(self, monkeypatch: pytest.MonkeyPatch):
        calls = []

        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            return hub.Dataset.from_list([CHAT, CHAT]).to_iterable_dataset()

        monkeypatch.setattr(hub, "load_dataset", load_dataset)
        reader = RowReader(tokenizer=chat_tokenizer())
        assert list(documents("org/name:train_sft", seed=3, token=None, reader=reader)) == ["<system>S<user>Hi"] * 2
        assert calls == [(("org/name",), {"name": None, "split": "train_sft", "streaming": True, "token": None})]

    def test_a_column_that_a_named_data_set_lacks_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        rows = hub.Dataset.from_list([{"body": "a"}]).to_iterable_dataset()
        monkeypatch.setattr(hub, "load_dataset", lambda *_, **__: rows)
        with pytest.raises(CalibrationError, match=r"org/name, shuffled row 1 has no text in the column 'content'"):
            list(documents("org/name:train", seed=0, reader=RowReader(column="content")))
