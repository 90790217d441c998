"""Rows of calibration data as texts: chats are rendered by the model's own chat template."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rocket_core.calibration.samples import RowCounts
from rocket_core.errors import CalibrationError, CheckpointFormatError
from rocket_core.inspection.files.text_rows import Chat, Row, row_document
from rocket_core.models.pretrained import TEMPLATE_SECONDS, interpreting
from rocket_core.system.time_limit import time_limit


@dataclass(kw_only=True, slots=True)
class RowReader:
    """Reads rows as texts, and counts those that it skips.

    Attributes:
        tokenizer: that of the model, with its chat template; None if the model has none.
        column: the column with the text; None finds it, see `row_document`.
        skip_bad_rows: whether rows that cannot be read or rendered are skipped.
        chats: number of rendered chats so far.
        skipped: number of skipped rows so far.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    column: str | None = None
    skip_bad_rows: bool = False
    chats: int = 0
    skipped: int = 0

    def read(self, rows: Iterable[Row]) -> Iterator[str | Chat]:
        """Yield the text or the chat of each row.

        Raises:
            CalibrationError: a row has neither, and is not to be skipped; the message names it.
        """
        for row in rows:
            try:
                found = row_document(row, self.column)
            except CalibrationError:
                self._skip()
            else:
                yield found

    def rendered(self, found: Iterable[str | Chat]) -> Iterator[str]:
        """Yield texts as they are, and chats as the chat template renders them, without a BOS token at the start.

        Raises:
            CalibrationError: the model has no chat template, or it fails for a chat that is not to be skipped; the
                message names the row.
            CheckpointFormatError: the template does not return.
        """
        for each in found:
            if isinstance(each, str):
                yield each
                continue
            template = self._template(each)
            try:
                text = _render(template, each)
            except CalibrationError:
                self._skip()
            else:
                self.chats += 1
                yield text

    @property
    def counts(self) -> RowCounts:
        """The rows that were read so far."""
        return RowCounts(chats=self.chats, skipped=self.skipped)

    def _template(self, chat: Chat) -> PreTrainedTokenizerBase:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise CalibrationError(
                f"{chat.where} is a chat, and the model has no chat template to write it as text; give rows with "
                '"text", or name a column that has it (--calibration-column, calibration.column)'
            )
        return self.tokenizer

    def _skip(self) -> None:
        """Count a row whose error is being handled, or raise that error again."""
        if not self.skip_bad_rows:
            raise  # noqa: PLE0704
        self.skipped += 1


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    content: dict[str, Any] = json.loads(chat.content)
    subject = f"{chat.where} with the model's chat template"
    late = CheckpointFormatError(f"{subject} took more than {TEMPLATE_SECONDS:.0f} seconds of processor time")
    advice = "correct the row, or skip such rows (--skip-bad-rows, calibration.skip_bad_rows)"
    with time_limit(TEMPLATE_SECONDS, late), interpreting(subject, CalibrationError, advice=advice):
        text = tokenizer.apply_chat_template(content["messages"], tools=content.get("tools"), tokenize=False)
        assert isinstance(text, str), "one conversation is rendered as one text"
    return text.removeprefix(tokenizer.bos_token or "")
