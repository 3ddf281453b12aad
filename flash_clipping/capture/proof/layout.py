"""Where the samples are in what a layer returns, and the table of that for a whole model.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flash_clipping.capture.row_layouts import Layout, layouts_of


@dataclass(frozen=True)
class SampleLayout:
    """How the rows of a layer's output map to samples.

    Attributes:
        kind: in words; one of the constants below, or one of :meth:`of`'s.
        layout: the axis and the order of the samples; ``None`` where there is no regular one.
        parts: entries of each sample along that axis.
    """

    kind: str
    layout: Layout | None = None
    parts: int = 0

    @classmethod
    def of(cls, layout: Layout, parts: int) -> SampleLayout:
        """The layout with its name."""
        axis, outer = layout.axis, layout.outer
        if parts == 1:
            kind = "sample by sample" if axis == 0 else "position by position"
        elif outer == 1:
            kind = f"{parts} parts of each sample together" + (f", axis {axis}" if axis else "")
        elif outer == parts:
            kind = "position by position" + (f", axis {axis}" if axis else "")
        else:
            kind = f"in {outer} rounds of all samples" + (f", axis {axis}" if axis else "")
        return cls(kind, layout, parts)


#: The output is the same for every batch: a table of positions, say.
CONSTANT = SampleLayout("the same for all samples")
#: No gradient reached the layer.
UNREACHED = SampleLayout("not reached by a gradient")
#: Each row has one sample, in no regular order: tokens that a router sent to an expert.
ROUTED = SampleLayout("routed")
#: Some row has several samples, and the output depends on the batch.
SEVERAL = SampleLayout("several samples in a row")

#: A row that no sample reaches (padding), and one that several reach.
NOBODY, MANY = -1, -2


def layout_of_owners(owners: Tensor, B: int, first_axis: int = 0) -> SampleLayout:
    """The simplest layout that these owners fit.

    Args:
        owners: the sample of each row, :data:`NOBODY` or :data:`MANY`; on the CPU, with the axes
            of the output but its last.
        B: samples.
        first_axis: the axis that is tried first.
    """
    if (owners == MANY).any():
        return SEVERAL
    if (owners == NOBODY).all():
        return UNREACHED
    candidates = layouts_of(owners.shape, B, owners.dim())
    candidates.sort(key=lambda layout: (layout.axis != first_axis, layout.axis, layout.outer))
    for layout in candidates:
        rows = layout.front(owners, B).reshape(B, -1)
        own = rows.new_tensor(range(B))[:, None]
        if ((rows == own) | (rows == NOBODY)).all():
            return SampleLayout.of(layout, owners.shape[layout.axis] // B)
    return ROUTED


@dataclass
class Table:
    """The result of a proof, for one kind of call.

    Attributes:
        layouts: of every layer that was called, by its path; one for each call where they differ.
        unfit: outputs from which no gradient may come back, by number, and why.
        outputs: the numbers of the outputs that were shown to be each sample's own.
        notes: what could not be looked at.
        returned: how many tensors the model returned.
    """

    layouts: Mapping[str, Sequence[SampleLayout]] = field(default_factory=dict)
    unfit: dict[int, str] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    returned: int = 0
