import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import datasets as hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from rocket_core.calibration import datasets
from rocket_core.calibration.datasets import (
    HELD_OUT_TOPICS,
    builtin_documents,
    documents,
    file_documents,
    held_out_text,
)
from rocket_core.config import HUB_DATASETS
from rocket_core.errors import CalibrationError, EmptyCalibrationError, HubUnavailableError, UnknownDatasetError
from rocket_core.inspection.files.dataset_names import local_path_of

ROOT = Path(__file__).parents[3]
HELD_OUT_FILE = ROOT / "examples" / "tiny-llama" / "heldout.txt"


def paragraphs(text: str) -> set[str]:
    """Return paragraphs with normalized white space, found line by line."""
    found = []
    for blank, lines in itertools.groupby(text.splitlines(), key=lambda line: not line.strip()):
        if not blank:
            found.append(" ".join(" ".join(lines).split()))
    return set(found)


class TestBuiltin:
    def test_no_long_held_out_paragraph_is_calibrated_on(self):
        held_out = {p for p in paragraphs(HELD_OUT_FILE.read_text(encoding="utf-8")) if len(p) >= 80}
        assert len(held_out) > 80
        assert held_out.isdisjoint(paragraphs("\n\n".join(builtin_documents())))

    def test_no_paragraph_of_this_pythons_held_out_topics_is_used(self):
        assert paragraphs(held_out_text()).isdisjoint(paragraphs("\n\n".join(builtin_documents())))

    def test_overlapping_topics_lose_only_held_out_paragraphs(self):
        from pydoc_data.topics import topics

        held_out = set().union(*(paragraphs(topics[name]) for name in HELD_OUT_TOPICS))
        kept = paragraphs("\n\n".join(builtin_documents()))
        repeating = paragraphs(topics["naming"])  # a section of "execmodel"
        assert repeating & held_out
        for name in sorted(set(topics) - set(HELD_OUT_TOPICS)):
            assert paragraphs(topics[name]) - held_out <= kept

    def test_the_held_out_text_is_prose_of_a_useful_length(self):
        assert 20_000 < len(held_out_text()) < 50_000

    def test_docstrings_come_from_modules_that_are_not_imported(self):
        before = set(sys.modules)
        text = "\n\n".join(builtin_documents())
        assert not {
            name for name in set(sys.modules) - before if name.split(".")[0] in ("turtle", "antigravity", "this")
        }
        assert "Turtle graphics is a popular way for introducing programming to" in text

    def test_indentation_is_kept(self):
        assert "   with EXPRESSION as TARGET:" in "\n".join(builtin_documents()).splitlines()

    def test_builtin_text_is_long_and_in_the_same_order_every_time(self):
        texts = builtin_documents()
        assert sum(map(len, texts)) > 1_000_000
        assert len(texts) > 300
        datasets._builtin_documents.cache_clear()
        assert builtin_documents() == texts

    def test_a_caller_cannot_change_the_cached_documents(self):
        builtin_documents().clear()
        assert builtin_documents()

    def test_docstrings_keep_the_order_of_the_source(self):
        source = '"""Module."""\nclass A:\n  """A."""\n  def b(self):\n    """A.b."""\ndef c():\n  """c."""\n'
        assert datasets._docstrings(datasets.ast.parse(source)) == ["Module.", "A.", "A.b.", "c."]

    def test_docstrings_are_found_in_every_kind_of_statement(self):
        function = "\n  async def f():\n    '{}'\n"
        places = (
            *("try:", "except* OSError:", "except* ValueError:", "else:", "finally:", "for _ in ():", "else:"),
            *("while x:", "else:", "if x:", "elif y:", "else:", "with x:", "def g():", "class A:"),
        )
        source = "".join(place + function.format(number) for number, place in enumerate(places))
        source += "match x:\n  case 1:\n    lambda: 0\n    def f():\n      def f():\n        'deep'\n"
        tree = datasets.ast.parse(source)
        documented = {node for node in datasets.ast.walk(tree) if isinstance(node, datasets._Documented)}
        assert documented <= set(datasets._statements(tree))
        assert datasets._docstrings(tree) == [*map(str, range(len(places))), "deep"]


class TestOrder:
    @pytest.fixture
    def numbered(self, tmp_path: Path) -> Path:
        path = tmp_path / "numbers.jsonl"
        path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(50)))
        return path

    def test_each_seed_gives_its_own_permutation(self, numbered: Path):
        first, again, other = (list(documents(str(numbered), seed=seed)) for seed in (7, 7, 8))
        in_order = [str(number) for number in range(50)]
        assert first == again
        assert first != other
        assert first != in_order
        assert sorted(first, key=int) == sorted(other, key=int) == in_order

    def test_file_documents_keeps_the_order_of_the_file(self, numbered: Path):
        assert list(file_documents(numbered)) == [str(number) for number in range(50)]

    def test_builtin_documents_are_permuted_too(self):
        first, other = list(documents("builtin", seed=0)), list(documents("builtin", seed=1))
        assert first != other
        assert sorted(first) == sorted(other) == sorted(builtin_documents())


class TestLocalText:
    def test_a_text_file_is_one_document_in_file_order(self, tmp_path: Path):
        path = tmp_path / "text.txt"
        path.write_text("one\n\ntwo \n \nthree\n")
        assert list(file_documents(path)) == ["one\n\ntwo \n \nthree\n"]

    def test_a_text_file_is_cut_into_passages_for_calibration(self, tmp_path: Path):
        path = tmp_path / "text.txt"
        blocks = [f"    {number} " + "x" * 1000 for number in range(40)]
        path.write_text("\n\n".join(blocks))
        passages = list(documents(str(path), seed=3))
        assert len(passages) == 5
        assert max(map(len, passages)) < 10_000
        assert sorted("\n\n".join(passages).split("\n\n")) == sorted(blocks)

    def test_a_byte_order_mark_is_not_text(self, tmp_path: Path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"\xef\xbb\xbfhello")
        assert list(file_documents(path)) == ["hello"]

    @pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
    @pytest.mark.parametrize("content", ["", " \n\n"])
    def test_a_file_without_text_is_refused(self, tmp_path: Path, name: str, content: str):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(EmptyCalibrationError, match=name):
            list(documents(str(path), seed=0))

    def test_invalid_utf_8_is_refused_with_its_position(self, tmp_path: Path):
        path = tmp_path / "latin.txt"
        path.write_bytes("café".encode("latin-1"))
        with pytest.raises(CalibrationError, match=r"latin\.txt is not UTF-8 text \(byte 0xe9 at offset 3\)"):
            list(documents(str(path), seed=0))


class TestLocalJsonLines:
    def test_blank_lines_and_other_keys_are_ignored(self, tmp_path: Path):
        path = tmp_path / "some.jsonl"
        path.write_text('{"text": "a", "id": 1}\n\n{"text": "b\\u2028c"}')
        assert list(file_documents(path)) == ["a", "b\u2028c"]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"{text: 1}", "not valid JSON"),
            (b'{"texts": "a"}', 'no string "text"'),
            (b'{"text": null}', 'no string "text"'),
            (b'["text"]', "not a JSON object"),
            (b'{"text": "\\ud800"}', "lone surrogate"),
            (b'{"text": "caf\xe9"}', "not UTF-8"),
        ],
    )
    def test_a_malformed_line_is_refused_with_file_and_number(self, tmp_path: Path, line: bytes, reason: str):
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
        with pytest.raises(CalibrationError, match=rf"bad\.jsonl, line 3.* {reason}|bad\.jsonl, line 3: .*{reason}"):
            list(documents(str(path), seed=0))

    def test_lines_are_read_lazily(self, tmp_path: Path):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"text": "fine"}\nnonsense\n')
        texts = file_documents(path)
        assert next(texts) == "fine"
        with pytest.raises(CalibrationError, match="line 2"):
            next(texts)

    def test_a_file_that_vanished_is_refused(self, tmp_path: Path):
        with pytest.raises(UnknownDatasetError, match=r"gone\.jsonl cannot be read: No such file"):
            list(file_documents(tmp_path / "gone.jsonl"))


class TestNames:
    @pytest.mark.parametrize("name", ["builtin", *HUB_DATASETS])
    def test_known_names_are_not_files(self, name: str):
        assert local_path_of(name) is None

    def test_a_file_is_distinguished_from_a_name(self, tmp_path: Path):
        path = tmp_path / "My texts.TXT"
        path.write_text("hello")
        assert local_path_of(str(path)) == path
        assert list(documents(str(path), seed=0)) == ["hello"]

    @pytest.mark.parametrize(
        ("typed", "meant"), [("wikitex2", "wikitext2"), ("Built-in", "builtin"), ("alpacas", "alpaca")]
    )
    def test_an_unknown_name_is_refused_with_a_suggestion(self, typed: str, meant: str):
        with pytest.raises(UnknownDatasetError, match=rf"{typed}.*builtin, wikitext2, ptb.*Did you mean '{meant}'\?"):
            documents(typed, seed=0)

    def test_an_unfamiliar_name_is_refused_without_a_suggestion(self):
        with pytest.raises(UnknownDatasetError) as refusal:
            local_path_of("tinyshakespeare")
        assert "Did you mean" not in str(refusal.value)

    def test_a_missing_file_and_a_folder_are_refused(self, tmp_path: Path):
        (tmp_path / "folder.txt").mkdir()
        for name in ("folder.txt", "missing.jsonl"):
            with pytest.raises(UnknownDatasetError, match=f"{name} does not exist or is not a file"):
                local_path_of(str(tmp_path / name))


class FakeHub:
    """Stands in for `datasets.load_dataset`: records its calls and streams rows from memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, dict]] = []
        self.rows: dict[str, list[str]] = {}

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return hub.Dataset.from_dict(self.rows).to_iterable_dataset()


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(hub, "load_dataset", fake)
    return fake


class TestHub:
    def test_every_configured_name_is_known(self):
        assert tuple(datasets._HUB) == HUB_DATASETS

    @pytest.mark.parametrize(
        ("name", "repository", "config", "revision", "data_files", "columns"),
        [
            ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", None, None, ["text"]),
            (
                "ptb",
                "ptb-text-only/ptb_text_only",
                None,
                "refs/convert/parquet",
                {"train": "penn_treebank/train/*.parquet"},
                ["sentence"],
            ),
            ("alpaca", "tatsu-lab/alpaca", None, None, None, ["instruction", "input", "output"]),
            ("refinedweb", "tiiuae/falcon-refinedweb", None, None, None, ["content"]),
            ("c4", "allenai/c4", "en", None, None, ["text"]),
        ],
    )
    def test_the_training_split_is_streamed_from_data_files(
        self, fake_hub: FakeHub, name, repository, config, revision, data_files, columns
    ):
        fake_hub.rows = {column: [f"{column} text"] for column in columns} | {"other": ["unused"]}
        assert list(documents(name, seed=0)) == ["\n".join(f"{column} text" for column in columns)]
        assert fake_hub.calls == [
            (
                (repository,),
                {
                    "name": config,
                    "revision": revision,
                    "data_files": data_files,
                    "split": "train",
                    "streaming": True,
                    "token": None,
                },
            )
        ]

    def test_the_seed_decides_the_order_of_rows(self, fake_hub: FakeHub):
        fake_hub.rows = {"text": [str(number) for number in range(30)]}
        first, again, other = (list(documents("c4", seed=seed)) for seed in (1, 1, 2))
        assert first == again
        assert first != other
        assert sorted(first, key=int) == sorted(other, key=int) == fake_hub.rows["text"]

    def test_consecutive_lines_stay_together(self, fake_hub: FakeHub):
        lines = [f" line {number} \n" if number % 3 else "" for number in range(150)]
        fake_hub.rows = {"text": lines}
        texts = list(documents("wikitext2", seed=0))
        assert len(texts) == 3
        assert all(text in "".join(lines) for text in texts)
        assert sum(map(len, texts)) == len("".join(lines))

    def test_an_empty_column_leaves_no_blank_line(self, fake_hub: FakeHub):
        fake_hub.rows = {"instruction": ["Greet."], "input": [""], "output": ["Hello!"]}
        assert list(documents("alpaca", seed=0)) == ["Greet.\nHello!"]

    def test_a_missing_column_is_named(self, fake_hub: FakeHub):
        fake_hub.rows = {"body": ["a"]}
        with pytest.raises(CalibrationError, match=r"falcon-refinedweb has no column content any more, only body"):
            list(documents("refinedweb", seed=0))

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionError("Couldn't reach 'allenai/c4' on the Hub"),
            OfflineModeIsEnabled("offline"),
            TimeoutError("timed out"),
            LocalEntryNotFoundError("not cached"),
            datasets.HttpClientError("connect failed"),
            HfHubHTTPError("500 Server Error", response=SimpleNamespace(headers={}, request=None)),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_an_unreachable_hub_is_retryable(self, monkeypatch: pytest.MonkeyPatch, error: Exception):
        monkeypatch.setattr(hub, "load_dataset", raising(error))
        with pytest.raises(HubUnavailableError, match="allenai/c4") as caught:
            next(documents("c4", seed=0))
        assert caught.value.retryable
        assert caught.value.__cause__ is error

    @pytest.mark.parametrize(
        "error",
        [
            hub.exceptions.DatasetNotFoundError("gated"),
            GatedRepoError("403 Client Error", response=SimpleNamespace(headers={}, request=None)),
            FileNotFoundError("no data files"),
            ValueError("no config"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_deleted_data_is_not_retryable(self, monkeypatch: pytest.MonkeyPatch, error: Exception):
        monkeypatch.setattr(hub, "load_dataset", raising(error))
        with pytest.raises(CalibrationError, match=r"tiiuae/falcon-refinedweb cannot be read .*log in if it is gated"):
            next(documents("refinedweb", seed=0))

    def test_a_connection_lost_while_reading_is_reported(self, monkeypatch: pytest.MonkeyPatch):
        def rows() -> Iterator[dict[str, str]]:
            # Two thousand rows: more than the permutation's buffer holds, so that some are returned before.
            yield from ({"text": str(number)} for number in range(2000))
            raise ConnectionError("Server Disconnected")

        stream = hub.IterableDataset.from_generator(rows)
        monkeypatch.setattr(hub, "load_dataset", lambda *args, **kwargs: stream)
        texts = documents("c4", seed=0)
        next(texts)
        with pytest.raises(HubUnavailableError, match="Server Disconnected"):
            list(texts)

    def test_ptb_is_read_from_parquet_without_a_configuration(self, tmp_path: Path):
        # The same layout as on the hub, read by the real loader.
        source = datasets._HUB["ptb"]
        for split in ("train", "test"):
            folder = tmp_path / "penn_treebank" / split
            folder.mkdir(parents=True)
            hub.Dataset.from_dict({"sentence": [split]}).to_parquet(folder / "0000.parquet")
        stream = hub.load_dataset(
            str(tmp_path), name=source.config, data_files={"train": source.data_files}, split="train", streaming=True
        )
        assert list(stream) == [{"sentence": "train"}]


def raising(error: Exception):
    def load_dataset(*args, **kwargs):
        raise error

    return load_dataset
