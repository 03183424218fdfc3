"""Packed layers: the same products as ``nn.Linear``, in whatever order they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foredraft.model.loader import prepare_target
from foredraft.model.packed_linear import PackedLinear, can_pack, pack_linear_layers
from tests.tiny import family_model

DTYPES = [d for d in (torch.float32, torch.bfloat16) if can_pack(d, torch.device("cpu"))]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(
        self, biases: tuple[bool, bool, bool] = (True, True, True), other: int = 0
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 96, bias=biases[0])
        self.k_proj = nn.Linear(64, 32, bias=biases[1])
        self.v_proj = nn.Linear(64 + other, 32, bias=biases[2])
        self.o_proj = nn.Linear(96, 64)
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(64, 80), "up_proj": nn.Linear(64, 80)})


def packed(
    block: Block, dtype: torch.dtype
) -> tuple[dict[str, nn.Linear], dict[str, PackedLinear]]:
    block = block.to(dtype).eval()
    plain = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    assert pack_linear_layers(block) == len(plain) == 6
    found = {n: m for n, m in block.named_modules() if isinstance(m, PackedLinear)}
    assert list(found) == list(plain)
    return plain, found


def check(plain: nn.Linear, layer: PackedLinear, x: torch.Tensor) -> None:
    out = layer(x)
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], plain.out_features)
    exact = x.double() @ plain.weight.double().T
    exact = exact if plain.bias is None else exact + plain.bias.double()
    assert (out.double() - exact).abs().max() <= exact.abs().max() * {
        torch.float32: 2**-20,
        torch.bfloat16: 2**-8,
    }[x.dtype]


@torch.no_grad()
@pytest.mark.parametrize(
    "block",
    [
        Block,
        lambda: Block((False,) * 3),
        lambda: Block((True, False, True)),
        lambda: Block(other=8),
    ],
    ids=["biases", "no biases", "one bias missing", "another input size"],
)
def test_every_order_of_calls(block, dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    plain, layers = packed(block(), dtype)
    for order in (
        ["q_proj", "k_proj", "v_proj"],
        ["v_proj", "k_proj", "q_proj", "v_proj"],
        ["q_proj", "q_proj", "k_proj", "q_proj", "v_proj", "v_proj", "k_proj"],
        ["mlp.gate_proj", "q_proj", "mlp.up_proj", "k_proj", "mlp.gate_proj", "o_proj"],
    ):
        inputs = {n: torch.randn(5, n, dtype=dtype) for n in (64, 72, 96)}
        for name in order:
            check(plain[name], layers[name], inputs[plain[name].in_features])
        for name in order:  # another tensor each time
            x = torch.randn(2, 3, plain[name].in_features, dtype=dtype)
            check(plain[name], layers[name], x)


@torch.no_grad()
def test_nothing_is_kept_once_all_have_read_it(dtype: torch.dtype) -> None:
    _, layers = packed(Block(), dtype)
    x = torch.randn(3, 64, dtype=dtype)
    for name in ("q_proj", "k_proj", "v_proj"):
        layers[name](x)
    shared = layers["q_proj"]._shared
    assert shared is layers["v_proj"]._shared
    assert shared._input is None and not shared._waiting


@torch.no_grad()
def test_no_rows(dtype: torch.dtype) -> None:
    plain, layers = packed(Block(), dtype)
    for name, layer in layers.items():
        assert layer(torch.empty(0, plain[name].in_features, dtype=dtype)).shape == (
            0,
            plain[name].out_features,
        )


def test_a_targets_weights_are_counted_before_they_are_packed() -> None:
    """Packed ones are no parameters any more, and a draft model's price is told by the count."""
    whole, half = (
        prepare_target("tiny", family_model("llama").to(dtype), None, 64).weight_bytes
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert whole == 2 * half > 0


def test_what_can_be_packed() -> None:
    """Every CPU of this test has float32 products; nothing else is packed by mistake."""
    cpu = torch.device("cpu")
    assert can_pack(torch.float32, cpu)
    assert not can_pack(torch.float64, cpu) and not can_pack(torch.float16, cpu)
    assert not can_pack(torch.float32, torch.device("meta"))
    target = prepare_target("tiny", family_model("llama"), None, 64)
    assert any(isinstance(module, PackedLinear) for module in target.model.modules())
