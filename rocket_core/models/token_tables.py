"""The matrices of a model with a row for every token: embedding and output head, which may be the same one."""

from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from rocket_core.layers.scaled_embedding import embedding_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """A matrix with a row for every token.

    Attributes:
        embedding: module that looks up its rows, or is named by others as the one that holds it; None if it only is a
            head.
        others: more modules that look up its rows, as encoder and decoder of T5 do.
        head: module that multiplies with it; None if it only is an embedding.
        predicts: whether the head predicts next tokens. The errors of other heads are not measured, as only the last
            hidden states count in their models.
    """

    embedding: str | None
    head: str | None
    predicts: bool = True
    others: tuple[str, ...] = ()

    @property
    def embeddings(self) -> tuple[str, ...]:
        """All modules that look up its rows."""
        return () if self.embedding is None else (self.embedding, *self.others)

    @property
    def name(self) -> str:
        """The module under whose name it is stored."""
        name = self.embedding or self.head
        assert name is not None
        return name

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that use it."""
        return (*self.embeddings, *(() if self.head is None else (self.head,)))

    @property
    def measured_head(self) -> str | None:
        """The head, if its errors are measured."""
        return self.head if self.predicts else None

    @property
    def measured_modules(self) -> tuple[str, ...]:
        """The modules whose errors are measured."""
        return (*self.embeddings, *(() if self.measured_head is None else (self.measured_head,)))

    def split(self) -> tuple["TokenTable", "TokenTable"]:
        """Return the tables of its embeddings and of its head, where the checkpoint has both.

        The configuration of T5 ties them in any case, and the checkpoint tells whether they are.
        """
        assert self.embedding is not None, "it has no head else"
        assert self.head is not None, "it has no embedding else"
        of_head = TokenTable(embedding=None, head=self.head, predicts=self.predicts)
        return replace(self, head=None), of_head


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


def find_tables(model: PreTrainedModel, *, predicts: bool) -> tuple[tuple[TokenTable, ...], dict[str, str]]:
    """Return the tables of a model, and those that cannot be quantized, with the reason.

    Args:
        model: the model; one that reads no text has no tables, or those of a decoder.
        predicts: whether it predicts next tokens, with its head.
    """
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    looked_up, multiplied = names.get(id(model.get_input_embeddings())), names.get(id(head))
    ties = model.all_tied_weights_keys
    reasons: dict[str, str] = {}
    tables: list[TokenTable] = []
    # In some encoder-decoders the head is tied to the embedding of the decoder, which the encoder does not share.
    sources = (ties.get(f"{looked_up}.weight", f"{looked_up}.weight"), ties.get(f"{multiplied}.weight", ""))
    found = dict.fromkeys(source.removesuffix(".weight") for source in sources)
    for name in (name for name in found if name and name in names.values()):
        tied = [target.removesuffix(".weight") for target, source in ties.items() if source == f"{name}.weight"]
        reason = _reason_against(model, name, tied, multiplied)
        if reason is None:
            has_head = multiplied in tied
            others = tuple(other for other in tied if other != multiplied)
            tables.append(
                TokenTable(embedding=name, head=multiplied if has_head else None, predicts=predicts, others=others)
            )
        else:
            reasons[name] = reason
    if multiplied is not None and f"{multiplied}.weight" not in {*ties, *ties.values()}:
        if type(head) is nn.Linear and predicts:
            tables.append(TokenTable(embedding=None, head=multiplied))
        else:
            reasons[multiplied] = "a head that does not predict next tokens" if predicts is False else _OTHER_CLASS
    return tuple(tables), reasons


_OTHER_CLASS = "computes more than a stock layer"


def _reason_against(model: PreTrainedModel, name: str, tied: list[str], head: str | None) -> str | None:
    """Return why an embedding cannot be quantized; None if it can."""
    if embedding_scale(model.get_submodule(name)) is None:
        return _OTHER_CLASS
    if head in tied and type(model.get_submodule(head)) is not nn.Linear:
        return "tied to a head that computes more than a product"
    known = (embedding_scale(model.get_submodule(other)) is not None for other in tied if other != head)
    return None if all(known) else "tied to other layers than the head and embeddings"
