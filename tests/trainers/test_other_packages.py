"""Training loops of other packages, beside one sample at a time in float64: several steps of plain
descent by clipped sums, none of which is lost to a proof or a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.oracle import assert_close

B, STEPS, TOLERANCE = 5, 3, 1e-6

#: (model, batch) -> losses of its samples, ``[B]``.
Losses = Callable[[Any, Any], Tensor]


def check_loop(
    model: nn.Module,
    draw: Callable[[], Any],
    losses: Losses,
    one: Callable[[Any, int], Any],
    mode: Any = "one_pass",
) -> None:
    """Norms and clipped sums in every step of a loop.

    Args:
        draw: a batch.
        one: the batch of one sample of a batch.
    """
    model, plain = model.double(), copy.deepcopy(model).double()
    flash: Any = GradSampleModuleFlashClipping(
        model, max_grad_norm=1.0, loss_reduction="sum", mode=mode
    )
    for _ in range(STEPS):
        batch = draw()
        grads: list[list[Tensor]] = []
        for b in range(B):
            plain.zero_grad()
            losses(plain, one(batch, b)).sum().backward()
            found = [p.grad for p in plain.parameters()]
            pairs = zip(found, plain.parameters(), strict=True)
            grads.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
        norms = torch.stack([torch.cat([g.flatten() for g in of_b]).norm() for of_b in grads])
        assert norms.min() > 0
        flash.max_grad_norm = bound = norms.median().item()
        model.zero_grad()
        losses(flash, batch).sum().backward()
        assert_close(flash.get_norm_sample(), norms, TOLERANCE, "norms")
        coef = (bound / (norms + 1e-6)).clamp(max=1)
        for place, (param, own) in enumerate(
            zip(model.parameters(), plain.parameters(), strict=True)
        ):
            expected = sum(c * of_b[place] for c, of_b in zip(coef, grads, strict=True))
            scale = max(float(expected.abs().max()), 1e-3 * bound)  # zeros: at that of the others
            assert param.grad is not None
            assert float((param.grad - expected).abs().max()) <= TOLERANCE * scale
            with torch.no_grad():
                param -= 0.05 * param.grad
                own.copy_(param)


def rows(batch: Any, b: int) -> Any:
    return {name: x[b : b + 1] for name, x in batch.items()}


# -- diffusers: the loss of predicted noise --------------------------------------------------------

BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "UNet2DModel": (
        BLOCKS
        | {"sample_size": 8, "in_channels": 4, "out_channels": 4, "attention_head_dim": 4}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {},
    ),
    "UNet2DConditionModel": (
        BLOCKS
        | {"sample_size": 8, "cross_attention_dim": 8, "attention_head_dim": 4}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"encoder_hidden_states": lambda: torch.randn(B, 5, 8).double()},
    ),
    "DiTTransformer2DModel": (
        {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 4}
        | {"num_attention_heads": 2, "in_channels": 4, "num_embeds_ada_norm": 8}
        | {"norm_num_groups": 4},
        {"class_labels": lambda: torch.randint(0, 8, (B,))},
    ),
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusion(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    options, conditions = DIFFUSERS[name]
    model = getattr(diffusers, name)(**options)
    for module in model.modules():
        if type(module).__name__ == "LabelEmbedding":
            module.dropout_prob = 0.0  # it draws by batch
    kept = torch.linspace(0.99, 0.01, 1000).double()

    def draw() -> Any:
        return {
            "clean": torch.randn(B, 4, 8, 8).double(),
            "noise": torch.randn(B, 4, 8, 8).double(),
            "timestep": torch.randint(0, 1000, (B,)),
            **{condition: make() for condition, make in conditions.items()},
        }

    def losses(model: Any, batch: Any) -> Tensor:
        clean, noise, others = batch["clean"], batch["noise"], {**batch}
        del others["clean"], others["noise"]
        part = kept[batch["timestep"]].view(-1, 1, 1, 1)
        noisy = part.sqrt() * clean + (1 - part).sqrt() * noise
        return (model(noisy, **others).sample - noise).square().mean((1, 2, 3))

    check_loop(model, draw, losses, rows)


# -- recommendation --------------------------------------------------------------------------------


# -- one sample at a time --------------------------------------------------------------------------


class Speech(nn.Module):
    """Texts to frames as Tacotron 2 has it: a prenet that reads frames time first, attention over
    the text in a loop of cells, and convolutions behind it."""

    def __init__(self, bins: int = 3, D: int = 6) -> None:
        super().__init__()
        self.text, self.before = nn.Embedding(9, D), nn.Conv1d(D, D, 3, padding=1)
        self.encoder = nn.LSTM(D, D // 2, batch_first=True, bidirectional=True)
        self.prenet, self.cell = nn.Linear(bins, D), nn.LSTMCell(2 * D, D)
        self.query, self.out = nn.Linear(D, D), nn.Linear(2 * D, bins)
        self.postnet = nn.Sequential(nn.Conv1d(bins, D, 3, padding=1), nn.GroupNorm(2, D))
        self.last = nn.Conv1d(D, bins, 3, padding=1)

    def forward(self, ids: Tensor, frames: Tensor) -> Tensor:
        memory = self.encoder(self.before(self.text(ids).mT).mT)[0]
        frames = frames.transpose(0, 1)
        read = torch.relu(self.prenet(torch.cat([torch.zeros_like(frames[:1]), frames])))
        context, state = memory.mean(1), None
        made = []
        for frame in read[:-1]:
            state = self.cell(torch.cat([frame, context], 1), state)
            weights = (memory @ self.query(state[0])[:, :, None]).softmax(1)
            context = (weights * memory).sum(1)
            made.append(self.out(torch.cat([state[0], context], 1)))
        mel = torch.stack(made, 1)
        return mel + self.last(torch.tanh(self.postnet(mel.mT))).mT


def test_speech() -> None:
    """Its recurrent layer is refused by name, and runs sample by sample; or is replaced."""
    torch.manual_seed(0)

    def draw() -> Any:
        return {"ids": torch.randint(0, 9, (B, 4)), "frames": torch.randn(B, 7, 3).double()}

    def losses(model: Any, batch: Any) -> Tensor:
        return (model(**batch) - batch["frames"]).square().mean((1, 2))

    with raises("FC110", NotImplementedError, match=r"encoder \(LSTM\)"):
        check_loop(Speech(), draw, losses, rows)
    check_loop(Speech(), draw, losses, rows, mode="one_by_one")
    check_loop(ModuleValidator.fix(Speech()), draw, losses, rows)


@pytest.mark.parametrize("layer", ["GCNConv", "GATConv", "TransformerConv"])
def test_graphs(layer: str) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    from torch_geometric.data import Batch, Data

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = getattr(geometric, layer)
            self.first, self.second, self.head = kind(4, 6), kind(6, 6), nn.Linear(6, 1)

        def forward(self, data: Any) -> Tensor:
            nodes = torch.tanh(self.first(data.x, data.edge_index))
            nodes = torch.tanh(self.second(nodes, data.edge_index))
            return self.head(geometric.global_mean_pool(nodes, data.batch, data.num_graphs))

    def draw() -> Any:
        sizes = [4 + b for b in range(B)]
        edges = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in sizes]
        nodes = [torch.randn(n, 4).double() for n in sizes]
        pairs = zip(nodes, edges, strict=True)
        return Batch.from_data_list([Data(x=x, edge_index=edge) for x, edge in pairs])

    def one(batch: Any, b: int) -> Any:
        return Batch.from_data_list([batch.get_example(b)])

    def losses(model: Any, batch: Any) -> Tensor:
        return (model(batch) - 1).square().sum(1)

    torch.manual_seed(0)
    check_loop(Graphs(), draw, losses, one, mode="one_by_one")
