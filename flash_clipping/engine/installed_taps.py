"""The taps of a wrapped model: which it gets, and how they come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from flash_clipping.capture.around import FINDERS
from flash_clipping.capture.compiled.regions import Regions
from flash_clipping.capture.factor_source import PARAMETER_CONTAINERS, owned_parameters
from flash_clipping.capture.root_forward import WatchedForward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.capture.two_pass import TwoPassForward
from flash_clipping.errors import InvalidValue
from flash_clipping.rules import find_rule
from flash_clipping.rules.normalization import forget_trials


class InstalledTaps:
    """Stand-ins for the forwards of a model and its layers, from the moment that this is made.

    Arguments are those of a wrapped model.

    Attributes:
        all: every stand-in, in the order in which they were installed.
        of_root: the one for the root's forward.
        regions: what is compiled of the model.

    Raises:
        ValueError: a pattern of ``folded_modules`` fits no module, or a layer is tapped already.
    """

    def __init__(
        self,
        root: nn.Module,
        session: ClippingSession,
        *,
        mode: str,
        by_function: bool,
        folded_modules: Sequence[str],
    ):
        #: By the owner of parameters that are used elsewhere: the path of the module whose tap
        #: stands in for them. Parameters, by ``id``, that none can stand in for.
        self._users: dict[nn.Module, str] = {}
        self.lost: set[int] = set()
        self.all = list(plan_taps(root, session, by_function, folded_modules))
        for tap in self.all:
            tap.install()
        self.regions = Regions(root, session, self.all)
        self.of_root = WatchedForward(root, session)
        self.of_root.install()
        self.all.append(self.of_root)
        self.regions.find(self.of_root)
        if mode == "two_pass":
            self.all.append(TwoPassForward(root, session))
            self.all[-1].install()

    def lend(self, root: nn.Module, params: Sequence[nn.Parameter]) -> None:
        """Let a module further up stand in for these parameters, which are used past all taps;
        those for which the root does already are ``lost``."""
        paths = {module: path for path, module in root.named_modules()}
        modules = {path: module for module, path in paths.items()}
        for param in params:
            owners = [m for m in paths if any(p is param for p in m._parameters.values())]
            for owner in owners:
                user = self._users.get(owner, paths[owner])
                if user:
                    if owner in self._users:
                        self._tap_of(modules[user], user).give_back(owner)
                    user = self._users[owner] = user.rpartition(".")[0]
                    self._tap_of(modules[user], user).borrow(owner, paths[owner])
                else:
                    self.lost.add(id(param))
            if not owners:
                self.lost.add(id(param))

    def _tap_of(self, module: nn.Module, path: str) -> Tap:
        found = next((tap for tap in self.all if tap.layer is module and type(tap) is Tap), None)
        return found or self._tap_inside(module, path)

    def _tap_inside(self, module: nn.Module, path: str) -> Tap:
        """A tap of a module that had none; what stands around the root's forward stays outside."""
        outside = [tap for tap in self.all if tap.layer is module]
        for outer in reversed(outside):
            outer.remove()
        tap = Tap(module, path, None, self.of_root.session)
        tap.install()
        for outer in outside:
            outer.instance_forward = vars(module)["forward"]
            outer.install()
        place = self.all.index(outside[0]) if outside else len(self.all)
        self.all.insert(place, tap)
        return tap

    def remove(self) -> None:
        """Every forward is again what it was."""
        self.regions.remove()
        while self.all:
            self.all.pop().remove()


def plan_taps(
    root: nn.Module, session: ClippingSession, by_function: bool, folded_modules: Sequence[str]
) -> Iterator[Tap]:
    """A tap for every module that owns parameters directly.

    A container of parameters (``nn.ParameterList``) has no forward: it belongs to its parent.
    """
    modules = dict(root.named_modules())
    paths = [*modules]
    folded: set[str] = set()
    for pattern in folded_modules:
        named = [path for path in paths if fnmatchcase(path, pattern)]
        if not named:
            raise InvalidValue(
                f"FC174 folded_modules: no module is named like {pattern!r}. Names look like "
                f"{', '.join(repr(path) for path in paths[1:4])}."
            )
        folded |= {p for name in named for p in paths if p == name or p.startswith(f"{name}.")}
    forget_trials()
    rules = {path: find_rule(module) for path, module in modules.items()}
    around = {tap.layer: tap for find in FINDERS for tap in find(root, session)}
    lists = [path for path, x in modules.items() if x in around and around[x].picks_rows]
    for path, rule in rules.items():
        if path in lists or (rule is not None and rule.folds and not rule.takes_samples):
            # What stands beside experts (a router, shared experts) reads tokens as they do.
            beside = path.rpartition(".")[0]
            folded |= {p for p in paths if not beside or p.startswith(f"{beside}.")}
    folded -= {p for path in lists for p in paths if p.startswith(f"{path}.")}
    parts: set[nn.Module] = set()  # of layers above them
    for path, module in modules.items():
        if isinstance(module, PARAMETER_CONTAINERS) or module in parts:
            continue
        if module in around:
            # Before parameters: Opacus' recurrent layers own aliases of their cells'.
            yield around[module]
            continue
        rule = None if by_function else rules[path]
        if rule is not None:
            parts.update(rule.parts(module).values())
        if owned_parameters(module) or (rule is not None and rule.parts(module)):
            yield Tap(module, path, rule, session, by_function, path in folded)
