"""Images of any size: the patches of all samples are the rows of one input (Qwen2-VL)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.survey.kinds import all_kinds
from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_truth
from tests.support.errors import raises
from tests.support.oracle import Truth

pytestmark = pytest.mark.filterwarnings("ignore")

#: Of every sample, the patches of each of its images, down and across; 4 become one token.
Sizes = Sequence[Sequence[tuple[int, int]]]

SIZES: dict[str, Sizes] = {
    "alike": [[(4, 4)], [(4, 4)], [(4, 4)]],
    "of several sizes": [[(4, 4)], [(4, 8)], [(8, 8)]],
    "two, one, none, one": [[(4, 4), (2, 4)], [(4, 8)], [], [(8, 4)]],
    "as many patches as samples": [[(2, 2)], [], [], []],
}
ROUNDED = 1e-6  # positions are turned in fp32


def qwen() -> Any:
    torch.manual_seed(0)
    model: Any = all_kinds()["Several modalities"]["Qwen2VLForConditionalGeneration"].build()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3 if param.dim() > 1 else 0.1)
    return model.double().train()


def batch_of(model: Any, sizes: Sizes) -> dict[str, Tensor]:
    """Texts around these images, padded to the longest."""
    torch.manual_seed(1)
    tokens = [[h * w // 4 for h, w in of_sample] for of_sample in sizes]
    ids = torch.zeros(len(sizes), max(sum(of) for of in tokens) + 6, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, of_sample in enumerate(tokens):
        text = [*torch.randint(6, 40, (3,)).tolist()]
        for count in of_sample:
            text += [model.config.image_token_id] * count + [7]
        ids[b, : len(text)], mask[b, : len(text)] = torch.tensor(text), 1
    grids = [(1, h, w) for of_sample in sizes for h, w in of_sample]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == model.config.image_token_id).long(),
        "pixel_values": torch.randn(sum(h * w for _, h, w in grids), 96, dtype=torch.float64),
        "image_grid_thw": torch.tensor(grids),
    }


def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    values = model(**batch).logits.square().mean(-1)
    return (values * batch["attention_mask"]).sum(1)


def truth_of(model: nn.Module, batch: dict[str, Tensor], sizes: Sizes) -> Truth:
    """Each sample alone, with its own images."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    patches = batch["pixel_values"].split([sum(h * w for h, w in of) for of in sizes])
    grids = batch["image_grid_thw"].split([len(of) for of in sizes])
    for b in range(len(sizes)):
        alone = {name: x[b : b + 1] for name, x in batch.items()}
        del alone["pixel_values"], alone["image_grid_thw"]
        if sizes[b]:
            alone |= {"pixel_values": patches[b], "image_grid_thw": grids[b]}
        params = [model.get_parameter(name) for name in names]
        grads = torch.autograd.grad(losses(model, alone).sum(), params, allow_unused=True)
        for name, param, grad in zip(names, params, grads, strict=True):
            rows[name].append(torch.zeros_like(param) if grad is None else grad)
    grads_B = {name: torch.stack(row) for name, row in rows.items()}
    norms = {n: g.flatten(1).norm(dim=1) for n, g in grads_B.items()}
    return Truth(torch.stack([*norms.values()]).norm(dim=0), norms, grads_B)


@pytest.mark.parametrize(("mode", "checkpointing"), [("one_pass", True), ("two_pass", False)])
@pytest.mark.parametrize("name", SIZES)
def test_images(name: str, mode: str, checkpointing: bool) -> None:
    """Steps on these images, and on others of other sizes."""
    model = qwen()
    plain = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    truths = []
    for sizes in (SIZES[name], SIZES["of several sizes"]):
        batch = batch_of(model, sizes)
        truths.append((batch, truth_of(plain, batch, sizes)))
    bound = truths[0][1].norms.median().item()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for batch, truth in truths:
        model.zero_grad(set_to_none=True)
        losses(flash, batch).mean().backward()
        check_truth(flash, model, truth, bound, ROUNDED)


def test_an_image_in_two_samples_is_refused() -> None:
    """Two images of 4 and 8 tokens, in texts with 8 and 4."""
    model = qwen()
    batch = batch_of(model, [[(4, 4)], [(4, 8)]])
    batch["image_grid_thw"] = batch["image_grid_thw"].flip(0)
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC209", match="pixel_values:"):
        losses(flash, batch)
