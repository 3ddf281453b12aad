"""Which samples a step takes: Poisson sampling, in one process or several.

The accountants assume that every step draws every sample independently with probability ``q``, the
*sample rate* that they are told. The samplers here do exactly that.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import distributed as dist

#: Steps between two numbers that ``torch.rand`` draws in fp32, in [0, 1).
_GRID = 1 << 24


class Announcer:
    """Tells the wrapped model how many samples the loader drew for its next forward.

    It does not where batches are fetched ahead of their forward, or left out: then nothing is known
    about the next forward, and the model is told that (``None``).
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._waiting = False
        self._ahead = False

    def __getstate__(self) -> dict[str, Any]:  # a worker has no model
        return self.__dict__ | {"_module": None}

    def follow(self, module: Any) -> None:
        """Announce to this wrapped model, or hooks, from now on."""
        self._module = weakref.ref(module)
        # In front of what may refuse the forward: the batch after a refusal is announced as well.
        handle = module._module.register_forward_pre_hook(self._note_forward, prepend=True)
        module.autograd_grad_sample_hooks.append(handle)

    def _note_forward(self, module: Any, args: Any) -> None:
        self._waiting = False

    def new_epoch(self) -> None:
        """The loader starts anew."""
        self._waiting = self._ahead = False

    def end_epoch(self) -> None:
        """The loader has given its last batch, or nobody asks it for more."""
        self.new_epoch()
        self._tell(None)

    def __call__(self, samples: int | None) -> None:
        self._ahead = self._ahead or self._waiting
        self._waiting = True
        self._tell(None if self._ahead else samples)

    def _tell(self, samples: int | None) -> None:
        module = self._module() if self._module is not None else None
        expect = getattr(module, "expect_samples", None)
        if expect is not None:
            expect(samples)


class PoissonSampler(UniformWithReplacementSampler):
    """Batches of indices: every step draws every sample independently, with the same probability.

    Args:
        num_samples: in the dataset.
        sample_rate: the probability; exact, as far as the generator is.
        steps: batches in an epoch.
        generator: what to draw with; PyTorch's default if ``None``.

    Attributes:
        drawn: batches that were ever drawn.
    """

    def __init__(self, *, num_samples: int, sample_rate: float, steps: int, generator: Any = None):
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.generator = generator
        self.drawn = 0
        #: Sizes of the batches of the running epoch that its loader has not given yet.
        self.sizes: deque[int] = deque()
        self.announce = Announcer()

    def __iter__(self) -> Iterator[list[int]]:
        self.announce.new_epoch()
        sizes: deque[int] = deque()
        self.sizes = sizes
        try:
            for _ in range(self.steps):
                indices = self._draw()
                self.drawn += 1
                sizes.append(len(indices))
                yield indices
        finally:  # a loop that was left early, too
            self.announce.end_epoch()

    def _draw(self) -> list[int]:
        # torch.rand(...) < rate draws by the next multiple of 2^-24: more than was accounted for.
        whole, rest = divmod(self.sample_rate * _GRID, 1)
        uniform = torch.rand(self.num_samples, generator=self.generator)
        mask = uniform < whole / _GRID
        edge = uniform == whole / _GRID
        if bool(edge.any()):
            again = torch.rand(
                int(edge.sum()), generator=self.generator, dtype=torch.float64, device=edge.device
            )
            mask[edge] = again < rest
        return mask.nonzero().flatten().tolist()


class ShardedPoissonSampler(PoissonSampler):
    """One process's part of batches that all processes draw together.

    Every sample is one process's, which draws it in every step with the given probability. All
    processes take as many steps, with local batches that may be empty. What they draw is
    independent, however their generators are seeded.

    How many samples a process draws is binomial, and which ones is uniform among as many: together
    that is every sample by itself. The numbers of all processes come from a key that they share, so
    that each of them knows all of these without asking. To ``BatchMemoryManager`` the sampler gives
    as many parts of a batch in every process as the largest one needs; some may be empty.

    Args:
        total_size: samples in the dataset, the same for all processes.
        sample_rate: the probability.
        steps: batches in an epoch, the same for all processes.
        rank: this process.
        world_size: how many there are.
        generator: where the seed comes from, together with ``rank``; entropy of the operating
            system if ``None``.
        key: the same in all processes; without, they know nothing of each other's numbers.

    Attributes:
        random: what to draw with; ``None``: ``generator`` itself, where it is a secure one.
        gives_parts: whether it gives parts, all of them in one step of all processes.
        is_last_part: whether the batch ends with the part that was given last.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        steps: int,
        rank: int,
        world_size: int,
        generator: Any = None,
        key: int | None = None,
    ):
        super().__init__(
            num_samples=len(range(rank, total_size, world_size)),
            sample_rate=sample_rate,
            steps=steps,
            generator=generator,
        )
        self.rank, self.world_size = rank, world_size
        seed: list[int] | None = None
        if generator is not None:
            seed = [int(torch.randint(1 << 62, (1,), generator=generator)), rank]
        self.random: np.random.Generator | None = np.random.default_rng(seed)
        self._shares = [len(range(r, total_size, world_size)) for r in range(world_size)]
        self._numbers = None if key is None else np.random.default_rng(key)
        self.gives_parts, self.is_last_part = False, True
        #: Samples of the largest part that a process has in the batch that was drawn last.
        self._largest = 0

    def __iter__(self) -> Iterator[list[int]]:
        splitter = sys._getframe(1).f_locals.get("self")  # who asks for the first batch
        limit = None
        knows_others = self._numbers is not None and self.random is not None
        if isinstance(splitter, BatchSplittingSampler) and knows_others:
            # Optimizers of other models step alone, and split as they like.
            serves = getattr(splitter.optimizer, "_serves_shards", False)
            limit = splitter.max_batch_size if serves else None
        self.gives_parts, self.is_last_part = limit is not None, True
        for indices in super().__iter__():
            parts = 1 if limit is None else max(1, -(-self._largest // limit))
            for number in range(parts):
                self.is_last_part = number == parts - 1
                yield indices[number::parts]

    def _draw(self) -> list[int]:
        if self.random is None:
            places = np.asarray(super()._draw(), dtype=np.int64)
        else:
            numbers = self.random if self._numbers is None else self._numbers
            counts = numbers.binomial(self._shares, self.sample_rate)
            self._largest = int(counts.max())
            places = self.random.choice(
                self.num_samples, int(counts[self.rank]), replace=False, shuffle=False
            )
            places.sort()
        indices: list[int] = (places * self.world_size + self.rank).tolist()
        return indices


def agree(size: int, steps: int, generator: Any) -> int:
    """A key that all processes have a part in; refuse loaders that do not draw from the same data.

    Raises:
        ValueError: the processes' loaders differ.
    """
    own = secrets.randbits(62)
    if generator is not None:
        own = int(torch.randint(1 << 62, (1,), generator=generator))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (size, steps, own))
    found = [of_process[:2] for of_process in gathered]
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {r}: {n} samples, {s} batches" for r, (n, s) in enumerate(found))
        raise ValueError(
            f"data_loader: the processes' loaders differ ({listed}). Expected the whole dataset "
            "and the same batch size in every process: each then draws its own share of it."
        )
    return sum(of_process[2] for of_process in gathered)
