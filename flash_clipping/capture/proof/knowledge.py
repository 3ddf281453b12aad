"""What proofs have shown of one model: where samples lie in what its layers read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set as AbstractSet
from dataclasses import dataclass, field, replace

from flash_clipping.capture.proof.reads import Read
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError


@dataclass
class Knowledge:
    """A look at a model writes into a copy (:meth:`to_look`), which replaces this as a whole.

    Attributes:
        proven: layers all of whose reads are samples.
        constants: layers that read what is the same for all samples, and whose outputs meet samples
            only.
        reads: for the others, read by read, in every call of the layer, whether it is samples.
        folded: layers whose rows are parts of samples: declared, found, or by their rules.
        found, folded_by_rule: those of them that a look found, and that are so by their rules.
        unreached: those of which it was not shown, as no gradient reached them: it must stay 0.
        layouts: where samples lie in what layers, and parameters that are used alone, read,
            if not along the first axis; ``layouts_after``: in what comes of such a use.
        plain: layers in which samples were seen to lie along the usual axis.
        laid_out: layers in which samples lie otherwise than as rows, or parts that lie together.
    """

    proven: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    reads: dict[str, list[list[bool]]] = field(default_factory=dict)
    folded: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    folded_by_rule: set[str] = field(default_factory=set)
    unreached: set[str] = field(default_factory=set)
    layouts: dict[str, Layout] = field(default_factory=dict)
    layouts_after: dict[str, Layout] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    laid_out: set[str] = field(default_factory=set)

    @property
    def depends_on_sizes(self) -> bool:
        """Whether some layer reads rows that are not the samples."""
        return bool(self.layouts) or not self.folded <= self.folded_by_rule

    def forget(self, paths: Iterable[str]) -> None:
        """Drop what was shown of these layers' reads."""
        for path in [*paths]:
            self.proven.discard(path)
            self.constants.discard(path)
            self.reads.pop(path, None)

    def is_samples(self, read: Read, any_call: bool) -> bool | None:
        """Whether this read is samples; ``None`` where that is not known.

        ``any_call``: calls come in another order than in forward, as they are recomputed.
        """
        path, call, place = read
        if path in self.proven:
            return True
        calls = self.reads.get(path, ())
        if not any_call and call < len(calls) and place < len(calls[call]):
            return calls[call][place]
        answers = {of_call[place] for of_call in calls if place < len(of_call)}
        return answers.pop() if len(answers) == 1 else None

    # -- a look -----------------------------------------------------------------------------------

    def to_look(self) -> Knowledge:
        """What a look begins with: what is declared, and nothing that was found before."""
        folded, by_rule = self.folded - self.found, self.folded_by_rule
        return Knowledge(folded=folded, folded_by_rule=by_rule, plain=self.plain)

    def note_parts(self, names: AbstractSet[str]) -> None:
        """The rows of these layers are parts of samples that lie together."""
        self.found |= names - self.folded
        self.folded |= names

    def note_unreached(self, name: str) -> None:
        """No gradient has reached this layer: whatever its rows are, that is right while none
        does."""
        if name not in self.folded - self.found:
            self.unreached.add(name)
            self.note_parts({name})

    def note_laid_out(self, name: str, key: str, layouts: Collection[Layout]) -> None:
        """Samples lie so in this layer, or in this use of its parameters (``key``)."""
        self.laid_out.add(name)
        self.proven.discard(name)
        if len(layouts) == 1:
            (self.layouts[key],) = layouts

    def merged_with(self, new: Knowledge) -> Knowledge:
        """What is known after a look: ``new``, and what was shown of other calls before.

        Raises:
            FlashClippingError: samples lay otherwise there: later calls could be of either kind.
        """
        is_plain = new.reads.keys() - new.layouts.keys()
        merged = []
        for old, now in ((self.layouts, new.layouts), (self.layouts_after, new.layouts_after)):
            for key in sorted(old.keys() | now.keys()):
                a, b = old.get(key), now.get(key)
                if a != b and (a or key in self.plain) and (b or key in new.reads):
                    raise FlashClippingError(
                        f"FC232 {key}: samples lie along another axis of what it reads than they "
                        f"did before: found {b}, expected {a} (None: along the batch axis). Keep "
                        "one axis, in training and evaluation and for batches of all "
                        f"sizes.{ONE_BY_ONE}"
                    )
            merged.append({**old, **now})
        laid_out = self.laid_out | new.laid_out
        shown = (self.found - self.unreached) | (new.found - new.unreached)
        return replace(
            new,
            proven=new.proven - laid_out,
            folded=self.folded | new.folded,
            found=self.found | new.found,
            unreached=(self.unreached | new.unreached) - shown,
            layouts=merged[0],
            layouts_after=merged[1],
            plain=self.plain | is_plain,
            laid_out=laid_out,
        )

    def without_reads(self) -> Knowledge:
        """After a look that failed: nothing is shown of any read."""
        return replace(self, proven=set(), constants=set(), reads={})
