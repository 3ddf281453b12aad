"""The cases whose clipped sums are compared with those of single samples."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.distributed import processes
from tests.distributed.processes import Adapted, C, Parts, clipped_step
from tests.support.models import Block

EVEN, UNEVEN, EMPTY, ONE_EACH = (0, 4, 8), (0, 5, 8), (0, 8, 8), (0, 1, 2)


def second_axis(param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if param.dim() > 1 else None


#: 5 samples of 5 positions in one process: by their sizes, either may be the samples.
CASES: dict[str, dict[str, Any]] = {
    "even": {"cuts": EVEN},
    "attention": {"cuts": UNEVEN, "net": {"kind": Block}},
    "uneven": {"cuts": UNEVEN},
    "empty": {"cuts": EMPTY},
    "empty in the first": {"cuts": (0, 0, 8)},
    "one each": {"cuts": ONE_EACH, "net": {"bare": True, "tied": True}},
    "one each, attention": {"cuts": ONE_EACH, "net": {"kind": Block}},
    "one each, two_pass": {"cuts": ONE_EACH, "mode": "two_pass"},
    "one each, checkpointed": {"cuts": ONE_EACH, "net": {"kind": Adapted, "checkpointed": True}},
    "bare": {"cuts": UNEVEN, "net": {"bare": True}},
    "tied": {"cuts": EVEN, "net": {"tied": True}},
    "frozen": {"cuts": UNEVEN, "frozen": ("embed", "blocks.0")},
    "LoRA": {"cuts": UNEVEN, "net": {"kind": Adapted}, "frozen": ("embed", "norm")},
    "accumulated": {"cuts": EVEN, "micro": 2},
    "leaves": {"cuts": UNEVEN, "how": "leaves"},
    "second axis": {"cuts": EVEN, "shards": {"shard_placement_fn": second_axis}},
    "kept whole": {"cuts": UNEVEN, "shards": {"reshard_after_forward": False}},
    "root sharded after forward": {"cuts": UNEVEN, "shards": {"reshard_after_forward": True}},
    "small buckets": {"cuts": UNEVEN, "bucket": 1},
    "per layer": {"cuts": EVEN, "clipping": "per_layer", "net": {"kind": Adapted}},
    "automatic": {"cuts": EMPTY, "clipping": "automatic"},
    "checkpointed": {"cuts": UNEVEN, "net": {"kind": Adapted, "checkpointed": True}},
    "re-entrant": {"cuts": UNEVEN, "net": {"kind": Adapted, "checkpointed": "re-entrant"}},
    "two_pass, re-entrant": {
        "cuts": EMPTY,
        "mode": "two_pass",
        "net": {"checkpointed": "re-entrant"},
    },
    "two_pass": {"cuts": UNEVEN, "mode": "two_pass"},
    "two_pass, empty": {"cuts": EMPTY, "mode": "two_pass"},
    "two_pass, tied": {"cuts": EVEN, "mode": "two_pass", "net": {"tied": True, "bare": True}},
    "two_pass, checkpointed": {
        "cuts": UNEVEN,
        "mode": "two_pass",
        "net": {"kind": Adapted, "checkpointed": True},
    },
    "offloaded": {"cuts": UNEVEN, "offloaded": True},
    "compiled blocks": {"cuts": UNEVEN, "compiled": "blocks", "net": {"blocks": 10}},
}


#: They take longer.
COMPILED: dict[str, dict[str, Any]] = {
    "blocks": {"cuts": UNEVEN, "compiled": "blocks"},
    "empty": {"cuts": EMPTY, "compiled": "blocks"},
    "two_pass": {"cuts": UNEVEN, "compiled": "blocks", "mode": "two_pass"},
    "root": {"cuts": UNEVEN, "compiled": "root"},
    "private": {"cuts": UNEVEN, "compiled": "private"},
    "shards": {"cuts": UNEVEN, "compiled": "shards", "net": {"blocks": 10}},
}


def clipped(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    options = dict(case)
    if options.pop("offloaded", False):
        options["shards"] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if options.get("clipping") == "per_layer":
        model = processes.make(**options["net"])
        trainable = [p for p in model.parameters() if p.requires_grad]
        options["max_grad_norm"] = [C / 4 + C / 40 * i for i in range(len(trainable))]
    return clipped_step(rank, **options)


def compiled(rank: int) -> Parts:
    return {name: partial(clipped, rank, case) for name, case in COMPILED.items()}
