"""The stream that all stages of a pipeline share.

What all of them must draw alike, batches and the count of adaptive clipping, is the same words. The
noise of a stage's own parameters is of words that no other stage has: its place in the pipeline is
part of their address, as a shard's is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from flash_clipping.randomness import SecretStream


def shared_by_stages(group: Any, own: SecretStream) -> SecretStream:
    """A stream whose key all processes of the group have in common; each of them calls this.

    Args:
        group: the processes of the pipeline.
        own: where this process's part of the key comes from.
    """
    # Imported when first needed: it loads half of torch.distributed.
    from flash_clipping.distributed.shard_noise import shared_stream

    if "nccl" in dist.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    return shared_stream([group], device, own)
