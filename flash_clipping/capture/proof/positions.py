"""Do documents of one row reach each other?

Before the first step with two documents or more, and when the model is called with other kinds of
arguments, it runs on the batch as it is, and again with other tokens in some documents; their
places stay. What layers read at the positions of all others must stay as it was. Each run keeps
documents whose number has, or has not, one bit: of any two, each stays while the other changes. In
a last run all inputs change, places as well: what stays then does not derive from the inputs.

``R`` rows of the batch, ``T`` positions of each, ``N = R·T``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.reads import Reads, are_alike
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError

#: Relative difference from which on a position was reached from another document. Kernels compute
#: rows of one batch alike whatever the others hold, but experts that get other numbers of rows.
REACHED, REACHED_LOW = 1e-5, 1e-2


def prove_positions(subject: Subject, units: Units, watched: int) -> None:
    """See that every layer reads positions in order, and documents do not reach each other.

    Leaves what was shown, for so many ``watched`` parameters, in ``session.rows.units_of_calls``
    and in the kind of the call.

    Raises:
        FlashClippingError: they do, or it cannot be seen; all layers are named.
    """
    known = subject.session.rows.units_of_calls
    runs = Runs(subject, units)

    def reads_where(stays_N: Tensor, changed: list[Tensor]) -> Reads:
        """What layers read with other tokens in these inputs, but where positions stay."""
        ids = {id(x) for x in changed}
        try:
            given = map_tensors(
                lambda x: other_tokens(stays_N, x) if id(x) in ids else x,
                (subject.args, subject.kwargs),
            )
            reads = runs.look(given)
        finally:
            units.forget_lost()  # other documents may not be finite: that is none of the step's
        if reads.refused is not None:
            raise reads.refused
        return reads

    index_N = units.map.index_M.cpu()  # a proof may wait for the device
    nothing_N = torch.zeros(len(index_N), dtype=torch.bool)
    try:
        whole = reads_where(nothing_N, [])
    except ModelsOwnError:
        return  # the forward itself will raise it
    known.proven = {read[0] for read in whole}
    sources = [  # inputs that have an entry for every position
        x
        for x in tensors_in((subject.args, subject.kwargs))
        if tuple(x.shape[:2]) == units.shape or x.shape[:1] == (len(index_N),)
    ]
    content = _content(units, sources)
    others: list[tuple[Reads, Tensor, Tensor]] = []
    try:
        for kept_N, moved_N in _kept(index_N):
            others.append((reads_where(~moved_N, content), kept_N, moved_N))
        moved = [*(reads for reads, _, _ in others), reads_where(nothing_N, sources)]
    except ModelsOwnError as error:
        raise FlashClippingError(
            "FC278 the model: units are parts of rows, and it could not be seen whether documents "
            f"reach each other: with other tokens it raised {error}"
        ) from error
    _refuse_constants(whole, moved)
    for reads, kept_N, moved_N in others:
        _compare(whole, reads, kept_N, moved_N)
    if others:
        subject.kind.apart = watched


def _content(units: Units, sources: list[Tensor]) -> list[Tensor]:
    """Those that hold what documents say, not where they are: no map, places or masks."""
    index_N = units.map.index_M
    candidates: list[Tensor] = []
    places: list[Tensor] = []
    for x in sources:
        flat = x.detach().reshape(len(index_N), -1)
        if flat.shape[1] == 1 and not x.is_floating_point():
            values = flat[:, 0].to(torch.int64)
            inside = index_N.to(x.device)
            if bool((values == inside).all()):
                continue
            one = (inside[1:] == inside[:-1]) & (inside[1:] >= 0)
            if bool((values.diff()[one] == 1).all()) and bool(one.any()):
                places.append(x)
                continue
        candidates.append(x)
    said = [x for x in candidates if x.dim() > 2 or len(x.detach().flatten().unique()) > 2]
    return said or candidates or places[:1]  # tokens may be consecutive, too; they come first


def _kept(index_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Which positions of documents stay, and which change, run by run; padding is nobody's."""
    inside_N = index_N >= 0
    documents = index_N[inside_N].unique()
    number_N = torch.searchsorted(documents, index_N)
    for bit in range(max(len(documents) - 1, 0).bit_length()):
        has_bit_N = (number_N >> bit & 1).bool()
        for kept_N in (has_bit_N, ~has_bit_N):
            yield kept_N & inside_N, ~kept_N & inside_N


def other_tokens(stays_N: Tensor, x: Tensor) -> Tensor:
    """``x`` with other values where a position does not stay; all of them occur in ``x``."""
    flat = x.detach().reshape(len(stays_N), -1)
    stays_N1 = stays_N.to(x.device).unsqueeze(1)
    if x.is_floating_point():
        changed = 0.5 - flat.roll(1, 1) if flat.shape[1] > 1 else 0.5 - flat
    else:
        known = flat[flat >= 0].unique()
        if len(known) > 1:
            places = torch.searchsorted(known, flat.contiguous())
            changed = known[(places + 1) % len(known)]
        else:
            changed = (flat - 1).abs()
        changed = torch.where(flat < 0, flat, changed)  # marks that nobody reads
    return torch.where(stays_N1, flat, changed.to(flat.dtype)).view(x.shape)


def _refuse_constants(whole: Reads, others: list[Reads]) -> None:
    """Refuse layers that read the same whatever the inputs are."""
    paths = {
        read[0]: None
        for read, a in whole.items()
        if all(
            (b := other.get(read)) is None
            or (a.digest is not None and b.digest is not None and torch.equal(a.digest, b.digest))
            for other in others
        )
    }
    if paths:
        raise FlashClippingError(
            f"FC278 {', '.join(paths)}: units are parts of rows (Documents with a map of "
            "positions), and what it reads does not derive from the model's inputs: positions that "
            "the model makes itself, say. Pass them to the model:\n"
            "    position_ids  # which begin at 0 in every document"
        )


def _compare(whole: Reads, other: Reads, kept_N: Tensor, moved_N: Tensor) -> None:
    """What layers read of documents that were kept must have stayed, and have changed elsewhere."""
    reached: dict[str, None] = {}
    changed = False
    for read, a in whole.items():
        b = other.get(read)
        if b is None:
            reached[read[0]] = None
            continue
        if a.digest is None or b.digest is None:
            continue
        different = REACHED_LOW if a.low or b.low else REACHED
        if not are_alike(a.digest[kept_N], b.digest[kept_N], different):
            reached[read[0]] = None
        if not torch.equal(a.digest[moved_N], b.digest[moved_N]):
            changed = True
    if reached:
        raise FlashClippingError(
            f"FC277 {', '.join(reached)}: units are parts of rows (Documents with a map of "
            "positions), and what is read at the positions of a document changes with the tokens "
            "of others. Give the model a block-diagonal mask; or position_ids that begin at 0 in "
            "every document, without an attention_mask and with use_cache=False; or cu_seqlens "
            "(flash-attention)."
        )
    if not changed:
        raise FlashClippingError(
            "FC278 the model: units are parts of rows, and other tokens changed nothing that its "
            "layers read, so that it cannot be seen whether documents reach each other. Give the "
            "model its tokens as a tensor with an entry for every position, [R, T]."
        )
