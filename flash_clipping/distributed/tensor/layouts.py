"""How a layer's tensors lie over a tensor mesh.

For a linear map ``Y = A Wᵀ + b``, per mesh dimension:

=========  =============  ============  ==========================  =========================
weight     input          output        gradient of the input       a process's share of g_b
=========  =============  ============  ==========================  =========================
Shard(0)   Replicate      Shard(-1)     Partial: own features only  rows of W and b
Shard(1)   Shard(-1)      Partial       Shard(-1)                   columns of W; all of b
Replicate  Replicate      Replicate     Replicate                   all of it
Replicate  Shard(t)       Shard(t)      Shard(t)                    a sum over own positions
=========  =============  ============  ==========================  =========================

A table of embeddings is a linear map of one-hot rows; a norm layer's weight is never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from flash_clipping.errors import FlashClippingError
from flash_clipping.rules.embedding import EmbeddingRule
from flash_clipping.rules.linear import LinearRule
from flash_clipping.rules.normalization import LayerNormRule, RMSNormRule
from flash_clipping.rules.registry import Rule, UnsupportedLayer


class Share(Enum):
    """What one process has of a per-sample gradient."""

    #: Elements that no other has: squared norms are added up over processes.
    SHARD = "a shard"
    #: All of it, as every other: counted once.
    WHOLE = "the whole"
    #: A term of a sum, of some of the positions: gradients are added up before they are squared.
    TERM = "a sum over some of the positions"


class Shares:
    """The shares of all parameters, by their ``id``, as layers have found them in forward.

    A parameter that nobody has told of is whole: it was not parallelized.
    """

    def __init__(self) -> None:
        self._of: dict[int, Share] = {}

    def note(self, name: str, key: int, share: Share) -> None:
        """A layer has found its parameter to be this; other uses must have found the same."""
        before = self._of.setdefault(key, share)
        if before is not share:
            raise FlashClippingError(
                f"{name}: found a parameter of which a process has {before.value} of the gradient "
                f"in one use, and {share.value} in another. Norms of both cannot be added up. "
                "Give all uses of a parameter inputs of one layout (all cut along the sequence, "
                "or none)."
            )

    def __getitem__(self, key: int) -> Share:
        return self._of.get(key, Share.WHOLE)


#: Rules of layers whose parameters may be ``DTensor``s, themselves and nothing derived from them.
SERVED = (LinearRule, EmbeddingRule, LayerNormRule, RMSNormRule)


@dataclass(frozen=True)
class Layout:
    """How one call of a layer lies.

    Attributes:
        input: how it wants its input.
        grad: what its gradient with respect to the local input is.
        output: what it returns.
        shape: of the whole output.
        share: a process's part of the weight's per-sample gradient.
        bias: the same of the bias.
        ids: of a table that is cut by words: processes have other words.
    """

    input: Any
    grad: Any
    output: Any
    shape: tuple[int, ...]
    share: Share
    bias: Share
    ids: bool = False


def layout_of(rule: Rule, weight: Any, x: Any, axis: int) -> Layout:
    """How a call lies.

    Raises:
        UnsupportedLayer: a process would have a part of the samples, or the weight is cut in a way
            that the layer's kind does not know.
    """
    if x.device_mesh != weight.device_mesh:
        raise UnsupportedLayer(
            f"found an input on {x.device_mesh}, and a weight on {weight.device_mesh}. Lay both "
            "out on one tensor mesh."
        )
    (cut,), (lies,) = weight.placements, x.placements
    if lies.is_shard(axis):
        raise UnsupportedLayer(
            f"found an input that is cut along axis {axis}, that of the samples. Processes of a "
            "tensor mesh see the same samples: cut it along the sequence or the features."
        )
    if type(rule) is LinearRule:
        return _of_linear(cut, lies, (*x.shape[:-1], weight.shape[0]), x.ndim - 1)
    if type(rule) is EmbeddingRule:
        return _of_table(cut, lies, (*x.shape, weight.shape[1]))
    if cut.is_replicate():
        features = range(x.ndim - weight.ndim, x.ndim)
        return _of_whole(lies, tuple(x.shape), features)
    raise UnsupportedLayer(f"found a norm layer's weight with placement {cut}. Leave it whole.")


def _of_linear(cut: Any, lies: Any, shape: tuple[int, ...], last: int) -> Layout:
    if cut.is_shard(0):
        return Layout(Replicate(), Partial(), Shard(last), shape, Share.SHARD, Share.SHARD)
    if cut.is_shard(1):
        return Layout(Shard(last), Shard(last), Partial(), shape, Share.SHARD, Share.WHOLE)
    return _of_whole(lies, shape, range(last, last + 1))


def _of_table(cut: Any, lies: Any, shape: tuple[int, ...]) -> Layout:
    whole = Replicate()
    if cut.is_shard(0):
        return Layout(whole, whole, Partial(), shape, Share.SHARD, Share.SHARD, ids=True)
    if cut.is_shard(1):
        return Layout(whole, whole, Shard(len(shape) - 1), shape, Share.SHARD, Share.SHARD)
    return _of_whole(lies, shape, range(0))


def _of_whole(lies: Any, shape: tuple[int, ...], features: range) -> Layout:
    """A layer whose parameters every process has."""
    if lies.is_partial() or any(lies.is_shard(axis) for axis in features):
        lies = Replicate()
    share = Share.WHOLE if lies.is_replicate() else Share.TERM
    return Layout(lies, lies, lies, shape, share, share)
