"""The matrices of a model with a row for every token: embedding and output head, which may be the same one."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from rocket_core.layers.scaled_embedding import embedding_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """A matrix with a row for every token.

    Attributes:
        embedding: module that looks up its rows; None if it only is a head.
        head: module that multiplies with it; None if it only is an embedding.
        predicts: whether the head predicts next tokens. The errors of other heads are not measured, as only the last
            hidden states count in their models.
    """

    embedding: str | None
    head: str | None
    predicts: bool = True

    @property
    def name(self) -> str:
        """The module under whose name it is stored."""
        name = self.embedding or self.head
        assert name is not None
        return name

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that use it."""
        return tuple(name for name in (self.embedding, self.head) if name is not None)

    @property
    def measured_head(self) -> str | None:
        """The head, if its errors are measured."""
        return self.head if self.predicts else None

    @property
    def measured_modules(self) -> tuple[str, ...]:
        """The modules whose errors are measured."""
        return tuple(name for name in (self.embedding, self.measured_head) if name is not None)


def token_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of token embedding and head, and of the modules that share a weight with them."""
    names = {id(module): name for name, module in model.named_modules()}
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {names[id(module)] for module in both if isinstance(module, nn.Embedding | nn.Linear)}
    for tie in model.all_tied_weights_keys.items():
        modules = {key.removesuffix(".weight") for key in tie if key.endswith(".weight")}
        if modules & found:
            found |= modules
    return tuple(sorted(found))


def find_tables(
    model: PreTrainedModel, *, predicts: bool, one_list: bool
) -> tuple[tuple[TokenTable, ...], dict[str, str]]:
    """Return the tables of a model, and those that cannot be quantized, with the reason.

    Args:
        model: the model; one that reads no text has no tables, or those of a decoder.
        predicts: whether it predicts next tokens, with its head.
        one_list: whether it has one list of blocks, which reads text.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up, multiplied = names.get(id(embedding)), names.get(id(head))
    ties = model.all_tied_weights_keys
    if not one_list:
        both = {looked_up: embedding, multiplied: head}
        return (), {
            name: "in a model that has an encoder and a decoder"
            for name, module in both.items()
            if name is not None and isinstance(module, nn.Embedding | nn.Linear) and f"{name}.weight" not in ties
        }
    tied = {target for target, source in ties.items() if source == f"{looked_up}.weight"}
    reasons: dict[str, str] = {}
    tables: list[TokenTable] = []
    if looked_up is not None:
        reason = _reason_against_embedding(embedding)
        if tied or f"{looked_up}.weight" in ties:
            reason = reason or _reason_against_tie(tied, multiplied, head)
        if reason is None:
            tables.append(TokenTable(embedding=looked_up, head=multiplied if tied else None, predicts=predicts))
        else:
            reasons[looked_up] = reason
    if multiplied is not None and f"{multiplied}.weight" not in {*ties, *ties.values()}:
        if type(head) is nn.Linear and predicts:
            tables.append(TokenTable(embedding=None, head=multiplied))
        else:
            reasons[multiplied] = "a head that does not predict next tokens" if predicts is False else _OTHER_CLASS
    return tuple(tables), reasons


_OTHER_CLASS = "computes more than a stock layer"


def _reason_against_embedding(embedding: nn.Module) -> str | None:
    return _OTHER_CLASS if embedding_scale(embedding) is None else None


def _reason_against_tie(tied: set[str], head_name: str | None, head: nn.Module | None) -> str | None:
    if tied != {f"{head_name}.weight"}:
        return "tied to other layers than the head"
    return None if type(head) is nn.Linear else "tied to a head that computes more than a product"
