import copy

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.layers import QuantizedEmbedding, TiedLinear, layer_tensors
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import EXPONENT, QUANTIZED, make_rounded, rounded_weight

TOKENS, HIDDEN = 23, 12
FORMATS = [*QUANTIZED.values(), CodeFormat(bits=6, group_size=12, scale_bits=6)]


def make_embedding(code_format, dtype=torch.float32, tokens=TOKENS, hidden=HIDDEN, **options):
    """Return an embedding, and its table in float64, entry by entry from the documented formula."""
    rounded = make_rounded(code_format, hidden, tokens)
    embedding = QuantizedEmbedding(
        tokens, hidden, code_format=code_format, scale_exponent=EXPONENT, padding_idx=3, dtype=dtype, **options
    )
    embedding.load_state_dict(layer_tensors(rounded, dtype))
    return embedding, rounded_weight(rounded)


@pytest.mark.parametrize("code_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
class TestLookup:
    def test_rows_are_those_of_the_table(self, code_format, dtype):
        embedding, table = make_embedding(code_format, dtype)
        tokens = torch.tensor([[0, TOKENS - 1, 5], [5, 1, 0]])
        found = embedding(tokens)
        assert (found.dtype, found.shape) == (dtype, (2, 3, HIDDEN))
        assert torch.equal(found, torch.nn.functional.embedding(tokens, embedding.dense_weight()))
        torch.testing.assert_close(found.double(), table[tokens], rtol=torch.finfo(dtype).eps, atol=0)

    def test_casting_rounds_once(self, code_format, dtype):
        embedding, _ = make_embedding(code_format)
        tokens, expected = torch.arange(TOKENS), make_embedding(code_format, dtype)[0].dense_weight()
        assert torch.equal(embedding.bfloat16().to(dtype)(tokens), expected)
        assert embedding.dtype == dtype
        assert embedding.weight.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding_multiplies_as_the_stock_one(dtype):
    scale = 1.1
    embedding, _ = make_embedding(FORMATS[0], dtype, stock_class=GemmaTextScaledWordEmbedding, scale=scale)
    stock = GemmaTextScaledWordEmbedding(TOKENS, HIDDEN, 3, embed_scale=scale).to(dtype)
    stock.weight.data.copy_(embedding.dense_weight())
    tokens = torch.arange(TOKENS)
    assert torch.equal(embedding(tokens), stock(tokens))


class TestEmbedding:
    def test_any_shape_and_integer_dtype_of_tokens(self):
        embedding, _ = make_embedding(FORMATS[0])
        table = embedding.dense_weight()
        assert torch.equal(embedding(torch.tensor(4)), table[4])
        assert torch.equal(embedding(torch.tensor([7], dtype=torch.int32)), table[7:8])
        assert embedding(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, HIDDEN)

    @pytest.mark.parametrize("token", [-1, TOKENS, 10**6])
    @pytest.mark.parametrize("code_format", FORMATS)
    def test_a_token_that_does_not_exist_is_an_error(self, token, code_format):
        embedding, _ = make_embedding(code_format)
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            embedding(torch.tensor([0, token]))

    def test_tensors_of_another_table_are_refused(self):
        embedding, _ = make_embedding(FORMATS[0])
        embedding.layer_name = "embed_tokens"
        embedding.weight = torch.nn.Parameter(embedding.weight[1:], requires_grad=False)
        with pytest.raises(CorruptCheckpointError, match="embed_tokens: weight is"):
            embedding(torch.tensor([0]))

    def test_an_offloaded_table_has_no_dense_weight(self):
        embedding, _ = make_embedding(FORMATS[0])
        with pytest.raises(RocketError, match="offloaded"):
            embedding.to("meta").dense_weight()

    def test_lookup_takes_memory_for_the_rows_alone(self):
        code_format = CodeFormat(bits=4, group_size=16, scale_bits=6)
        embedding, _ = make_embedding(code_format, tokens=512, hidden=64)
        stored = {parameter.data_ptr() for parameter in embedding.parameters()}
        largest = []

        class Watching(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in stored:
                    largest.append(result.numel())
                return result

        embedding(torch.tensor([1]))
        with Watching():
            embedding(torch.tensor([1, 2]))
        assert 2 * 64 <= max(largest) < 20 * 64


class TestTiedHead:
    @pytest.mark.parametrize("form", ["packed", "unpack_", "prepare_"])
    def test_the_head_multiplies_with_the_table(self, form):
        embedding, table = make_embedding(FORMATS[0])
        head = TiedLinear(embedding)
        if form != "packed":
            getattr(head, form)()
        x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(head(x).double(), x.double() @ table.T, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("form", ["packed", "unpack_", "prepare_"])
    def test_the_state_dict_shares_memory_with_the_table(self, form):
        model = torch.nn.Module()
        model.embedding, _ = make_embedding(FORMATS[0])
        model.head = TiedLinear(model.embedding)
        if form != "packed":
            getattr(model.head, form)()
        for each in (model, copy.deepcopy(model)):
            state = each.state_dict()
            for part in ("weight", "weight_scale"):
                assert state[f"head.{part}"].data_ptr() == state[f"embedding.{part}"].data_ptr()

    @pytest.mark.parametrize("form", ["unpack_", "prepare_"])
    def test_tying_again_changes_nothing(self, form):
        embedding, _ = make_embedding(FORMATS[0])
        head = TiedLinear(embedding)
        getattr(head, form)()
        before = head.dense_weight()
        head.weight = embedding.weight
        assert torch.equal(head.dense_weight(), before)
        with pytest.raises(RocketError, match="cannot be written"):
            head.weight = torch.nn.Parameter(before)
