import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rocket_core.errors import CalibrationError, UnknownDatasetError
from rocket_core.inspection.files.text_rows import Chat, Row, read_rows, row_document, text_files, text_suffix

ROWS = [{"text": "one"}, {"text": 'two, "quoted"\nlines'}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'text,id\none,1\n"two, ""quoted""\nlines",2\n'


def messages_of(fields: dict, column: str | None = None) -> list[dict]:
    found = row_document(Row(where="row 1", fields=fields), column)
    assert isinstance(found, Chat)
    return json.loads(found.content)["messages"]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", LINES.encode()),
            ("a.json", json.dumps(ROWS, indent=1).encode()),
            ("lines.json", LINES.encode()),
            ("a.csv", CSV.encode()),
            ("a.CSV", b"\xef\xbb\xbf" + CSV.encode()),
            ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
            ("a.csv.bz2", bz2.compress(CSV.encode())),
            ("a.json.xz", lzma.compress(json.dumps(ROWS).encode())),
        ],
    )
    def test_every_format_gives_the_same_texts(self, tmp_path: Path, name: str, content: bytes):
        (tmp_path / name).write_bytes(content)
        assert [row_document(row) for row in read_rows(tmp_path / name)] == [row["text"] for row in ROWS]

    def test_parquet_gives_the_same_texts(self, tmp_path: Path):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
        assert [row_document(row) for row in read_rows(tmp_path / "a.parquet")] == [row["text"] for row in ROWS]

    def test_parquet_adds_no_members_to_messages(self, tmp_path: Path):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"x": 1}}}]}
        rows = [{"messages": [{"role": "user", "content": "hi"}, call]}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        (row,) = read_rows(tmp_path / "a.parquet")
        assert messages_of(dict(row.fields)) == rows[0]["messages"]

    def test_a_folder_gives_its_text_files_by_name(self, tmp_path: Path):
        for name in ("b.md", "a.txt", "c.png", "empty.txt"):
            (tmp_path / name).write_text("" if name == "empty.txt" else name)
        (tmp_path / "d.md").mkdir()
        assert [row_document(row) for row in read_rows(tmp_path)] == ["a.txt", "b.md"]
        assert [file.name for file in text_files(tmp_path)] == ["a.txt", "b.md", "empty.txt"]

    def test_a_long_csv_field_is_read(self, tmp_path: Path):
        (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
        (row,) = read_rows(tmp_path / "a.csv")
        assert len(row.fields["text"]) == 200_000

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.json", b'[{"text": "a"}, 5]', r"a\.json, row 2 is not a JSON object"),
            ("a.json", b'[{"text"', r"a\.json is not valid JSON"),
            ("a.csv", b"text\nfine\ncaf\xe9\n", r"a\.csv is not UTF-8 text after row"),
            ("a.csv", b'text\n"a\0b"\n', None),
            ("a.parquet", b"PAR1", r"a\.parquet cannot be read as parquet"),
            ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-12], r"a\.jsonl\.gz cannot be decompressed"),
            ("a.txt.xz", b"no xz", r"a\.txt\.xz cannot be decompressed"),
        ],
    )
    def test_a_damaged_file_is_refused_with_its_name(
        self, tmp_path: Path, name: str, content: bytes, message: str | None
    ):
        (tmp_path / name).write_bytes(content)
        if message is None:
            assert len(list(read_rows(tmp_path / name))) <= 1
            return
        with pytest.raises((CalibrationError, UnknownDatasetError), match=message):
            list(read_rows(tmp_path / name))

    @pytest.mark.parametrize(
        ("name", "suffix"),
        [("a.TXT", ".txt"), ("a.jsonl.gz", ".jsonl"), ("a.tar.gz", None), ("a.gz", None), ("a.pdf", None)],
    )
    def test_the_suffix_decides_what_is_read(self, name: str, suffix: str | None):
        assert text_suffix(Path(name)) == suffix


class TestDocuments:
    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
            {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]'},
            {"text": None, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
            {"instruction": "Hi", "input": "", "output": "Yes"},
            {"prompt": "Hi", "completion": "Yes"},
            {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yes"}]},
        ],
        ids=["openai", "openai as text", "sharegpt", "alpaca", "prompt", "trl"],
    )
    def test_chats_of_all_kinds_become_the_same_messages(self, fields: dict):
        assert messages_of(fields) == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]

    def test_the_input_of_an_instruction_follows_it(self):
        (asked, _) = messages_of({"instruction": "Add", "input": "1, 2", "output": "3"})
        assert asked["content"] == "Add\n\n1, 2"

    def test_a_system_prompt_and_tools_belong_to_the_chat(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        for given in (tools, json.dumps(tools)):
            fields = {"conversations": [{"from": "human", "value": "Hi"}], "system": "Be kind", "tools": given}
            found = row_document(Row(where="row", fields=fields))
            assert isinstance(found, Chat)
            content = json.loads(found.content)
            assert content["messages"][0] == {"role": "system", "content": "Be kind"}
            assert content["tools"] == tools

    def test_a_call_of_a_tool_is_one_in_openai_form(self):
        turns = [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
        ]
        _, call, answer = messages_of({"conversations": turns})
        assert call["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
        assert answer == {"role": "tool", "content": "2"}

    def test_a_column_may_hold_text_or_messages(self):
        fields = {"text": "unused", "body": "taken", "chosen": [{"role": "user", "content": "Hi"}]}
        assert row_document(Row(where="row", fields=fields), "body") == "taken"
        assert messages_of(fields, "chosen") == fields["chosen"]

    def test_a_text_wins_over_a_chat(self):
        fields = {"text": "taken", "messages": [{"role": "user", "content": "Hi"}]}
        assert row_document(Row(where="row", fields=fields)) == "taken"

    @pytest.mark.parametrize(
        ("fields", "column", "message"),
        [
            ({"body": "a"}, None, r'row 7 has no string "text" and no chat.*--calibration-column'),
            ({"messages": []}, None, "row 7 has no string"),
            ({"body": "a"}, "content", r"row 7 has no text in the column 'content', only the columns 'body'"),
            ({"conversations": [{"from": "alien", "value": "a"}]}, None, "row 7 has a message with neither"),
            ({"instruction": "a"}, None, "row 7 has no string"),
        ],
    )
    def test_a_row_without_text_is_refused_by_name(self, fields: dict, column: str | None, message: str):
        with pytest.raises(CalibrationError, match=message):
            row_document(Row(where="row 7", fields=fields), column)
