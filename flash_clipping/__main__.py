"""The command ``flash-clipping`` (also ``python -m flash_clipping``).

flash-clipping check my_project.train:factory
flash-clipping plan --samples 60000 --batch-size 1024 --epochs 10 --epsilon 3
flash-clipping audit scores.json --guesses 300
flash-clipping env
flash-clipping compose first.json second.json --delta 1e-5
flash-clipping errors FC101
flash-clipping --version
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flash_clipping import __version__
from flash_clipping.codes import entries, entry
from flash_clipping.errors import Coded, InvalidValue, MissingPackage, checked_number

# PyTorch takes seconds to import: commands import what they use, and --help does without.

_DTYPES = ("float64", "float32", "bfloat16", "float16")

_CHECK_DESCRIPTION = """\
Compare flash clipping on one batch with per-sample gradients taken in float64, parameter by
parameter, and see whether samples are independent of each other. Exit status: 0 when everything
agrees, 1 when anything fails, 2 when the factory cannot be used.

The factory is a function without arguments that returns (model, batch) or (model, batch, loss):

  model  a plain nn.Module, on its device, not wrapped
  batch  a tensor, or tensors in a tuple, list or dict; axis 0 counts the samples. Without a loss
         it is the model's input: a tuple or list positionally, a dict by keyword
  loss   loss(model, batch) returns one loss per sample, [B], or a scalar reduced over the samples
         by --loss-reduction; it sees the whole batch, labels included

The current directory is importable. A few samples of a real batch are enough: the oracle runs one
sample at a time.
"""


_AUDIT_DESCRIPTION = """\
Compare what a training run shows of its canaries with the epsilon that was promised
(flash_clipping.auditing). Exit status: 0 when nothing contradicts it, 1 when the run leaked more, 2
when the file cannot be used. The file:

  {"scores": [0.1, ...], "included": [true, ...], "epsilon": 3.0, "delta": 1e-5}

  scores    of every canary, higher where it looks as if it were in the training data
  included  whether it was, by a fair coin
"""


class FactoryError(Coded):
    """A factory that gives nothing to check; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = argparse.Namespace(refusals=())
    try:
        try:
            run = _parser().parse_args(argv, args).run
            if args.command != "errors" and sys.stderr.isatty() and "torch" not in sys.modules:
                _tell("loading PyTorch")
            status: int = run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output (head) has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as of a process that SIGPIPE has ended
    except args.refusals as error:
        place = f" {args.file}:" if "file" in args else ""
        print(f"flash-clipping {args.command}:{place} {error}", file=sys.stderr)
        return 2
    return status


def _show(report: dict[str, Any], text: object, args: argparse.Namespace) -> None:
    print(json.dumps(report, indent=2) if args.json else text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flash-clipping", description="Flash Clipping's tools.")
    parser.add_argument("--version", action="version", version=f"flash-clipping {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    check = commands.add_parser(
        "check",
        help="compare a model's norms and clipped sums with a float64 oracle",
        description=_CHECK_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("factory", metavar="MODULE:FACTORY", help="e.g. my_project.train:factory")
    check.add_argument("--loss-reduction", choices=("mean", "sum"), default="mean")
    check.add_argument("--mode", choices=("one_pass", "two_pass"), default="one_pass")
    check.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    check.add_argument(
        "--batch-second", dest="batch_first", action="store_false", help="samples are axis 1"
    )
    check.add_argument(
        "--folded",
        dest="folded_modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="modules whose rows are parts of samples (folded_modules); may be repeated",
    )
    check.add_argument(
        "--no-strict", dest="strict", action="store_false", help="accept buffers that change"
    )
    check.add_argument("--dtype", choices=_DTYPES, help="cast model and batch before the check")
    check.add_argument("--device", help="move model and batch there before the check")
    check.add_argument("--tolerance", type=float, help="relative error allowed")
    check.add_argument("--max-grad-norm", type=float, help="C; default: the median norm")
    check.add_argument(
        "--removals", type=int, default=16, help="how many samples to remove, one at a time"
    )
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.set_defaults(run=_check, refusals=(FactoryError, InvalidValue))
    plan = commands.add_parser(
        "plan",
        help="what noise an epsilon needs, and what batches and epochs cost",
        description="The noise that an epsilon needs, or the epsilon that a noise has; then the "
        "epsilon of other batch sizes and epochs at that noise.",
    )
    plan.add_argument("--samples", "--dataset-size", type=int, required=True, help="in the dataset")
    plan.add_argument("--batch-size", type=int, required=True, help="expected, of a step")
    duration = plan.add_mutually_exclusive_group(required=True)
    duration.add_argument("--epochs", type=float)
    duration.add_argument("--steps", type=int, help="instead of --epochs")
    noise = plan.add_mutually_exclusive_group(required=True)
    noise.add_argument("--epsilon", type=float)
    noise.add_argument("--noise-multiplier", type=float, help="instead of --epsilon")
    plan.add_argument("--delta", type=float, help="default: a tenth of 1 / samples")
    plan.add_argument("--accountant", default="prv", choices=("prv", "rdp", "gdp", "pld"))
    plan.add_argument("--max-physical-batch-size", type=int, help="what fits on the device")
    plan.add_argument("--parameters", type=int, help="trainable ones, for noise over signal")
    plan.add_argument("--plot", metavar="FILE", help="draw the table of epsilon (needs matplotlib)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan, refusals=(ImportError, OSError, ValueError))
    audit = commands.add_parser(
        "audit",
        help="a lower bound on epsilon, from scores of canaries",
        description=_AUDIT_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit.add_argument("file", metavar="FILE", help="JSON, as above")
    audit.add_argument("--guesses", type=int, required=True, help="canaries not to abstain on")
    audit.add_argument("--confidence", type=float, default=0.95)
    audit.add_argument("--gaussian", action="store_true", help="the tighter bound, of Gaussians")
    audit.add_argument("--json", action="store_true", help="print what was found as JSON")
    audit.set_defaults(run=_audit, refusals=(OSError, TypeError, ValueError))
    env = commands.add_parser(
        "env",
        help="describe the installation, for a bug report",
        description="Print versions, devices, Triton's state and settings, for a bug report.",
    )
    env.add_argument("--json", action="store_true", help="print the report as JSON")
    env.set_defaults(run=_env, refusals=())
    composed = commands.add_parser(
        "compose",
        help="epsilon of several runs on one dataset, from their reports",
        description="Compose reports of engine.report(delta), and print the report of all as JSON.",
    )
    composed.add_argument("reports", metavar="FILE", nargs="+", help="JSON of engine.report(delta)")
    composed.add_argument("--delta", type=float, help="by default that of the reports")
    composed.set_defaults(run=_compose, refusals=(OSError, ValueError))
    errors = commands.add_parser("errors", help="what a code of an error or a warning means")
    errors.add_argument("code", metavar="CODE", nargs="?", help="e.g. FC101; without, all of them")
    errors.set_defaults(run=_errors, refusals=(InvalidValue,))
    return parser


def _env(args: argparse.Namespace) -> int:
    from flash_clipping import diagnostics

    report = diagnostics.environment()
    _show(report, diagnostics.environment_text(report), args)
    return 0


def _compose(args: argparse.Namespace) -> int:
    from flash_clipping.noise.report import compose

    reports = [_json(path) for path in args.reports]
    _tell(f"composing {len(reports)} reports")
    print(json.dumps(compose(reports, delta=args.delta), indent=2))
    return 0


def _errors(args: argparse.Namespace) -> int:
    every = "\n".join(f"{one.code} {one.message}" for one in entries())
    print(entry(args.code) if args.code else every)
    return 0


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(
            f"FC932 {path}: found no JSON ({error}); expected a file of it."
        ) from error


def _tell(doing: str) -> None:
    """What the command does, for who waits for it; its result alone is on the standard output."""
    print(f"flash-clipping: {doing} ...", file=sys.stderr, flush=True)


def _options(args: argparse.Namespace, *others: str) -> dict[str, Any]:
    """What a function of the library takes of these, by the same names."""
    others = ("command", "run", "refusals", "json", *others)
    return {name: value for name, value in vars(args).items() if name not in others}


def _check(args: argparse.Namespace) -> int:
    import torch

    from flash_clipping import diagnostics
    from flash_clipping.capture.inputs import map_tensors

    # Expected of a model whose first layer takes integers; nothing a reader can act on.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    checked_number("--seed", args.seed, "[-9223372036854775808, 18446744073709551615]", 0)
    torch.manual_seed(args.seed)
    _tell(f"loading {args.factory}")
    model, batch, loss = load_factory(args.factory)
    if args.device is not None:
        try:
            model = model.to(args.device)
            batch = map_tensors(lambda x: x.to(args.device), batch, packed=True)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise FactoryError(
                f"FC921 --device {args.device}: cannot move there: {error}"
            ) from error
    device = next(model.parameters()).device.type
    if device == "meta":
        raise FactoryError(f"FC125 {args.factory}: found parameters on the meta device.")
    if (args.backend, device) == ("triton", "cpu") and "TRITON_INTERPRET" not in os.environ:
        raise FactoryError(
            "FC721 --backend triton: found a model on the CPU; expected one on a GPU, or "
            "TRITON_INTERPRET=1 in the environment."
        )
    logger = logging.getLogger("flash_clipping.diagnostics")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [logging.StreamHandler()]
    logger.handlers[0].setFormatter(logging.Formatter("flash-clipping: %(message)s ..."))
    options = _options(args, "factory", "device")
    options["dtype"] = getattr(torch, args.dtype) if args.dtype else None
    report = diagnostics.check(model, batch, loss, **options)
    _show(report.to_dict(), report, args)
    return 0 if report.passed else 1


def _plan(args: argparse.Namespace) -> int:
    from flash_clipping import planning

    _tell(f"computing the noise and epsilon of this plan ({args.accountant})")
    shown = ("max_physical_batch_size", "parameters", "plot")
    found = planning.plan(**_options(args, *shown))
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    rows = found.rows(args.max_physical_batch_size, args.parameters)
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    batches = [b for b in (found.batch_size // 2, found.batch_size, 2 * found.batch_size) if b]
    batches = [b for b in batches if b <= found.samples]
    epochs = [found.epochs * times for times in (0.5, 1, 2, 4)]
    _tell(f"computing epsilon of {len(batches) * len(epochs)} other plans")
    grid = found.over(batches, epochs)
    print(f"\nε at σ = {found.noise_multiplier:.4g}, by expected batch and epochs")
    print(f"{'':>10}" + "".join(f"{count:>10.3g}" for count in epochs))
    for batch, row in zip(batches, grid, strict=True):
        print(f"{batch:>10,}" + "".join(f"{each.epsilon:>10.3g}" for each in row))
    if not found.delta_is_small:
        print(
            f"\nδ = {found.delta:g} is not below 1 / {found.samples:,}: to publish one sample as "
            f"it is, chosen at random, has such a δ. Take --delta {0.1 / found.samples:.1g}."
        )
    if args.plot:
        _draw(args.plot, batches, epochs, grid)
    return 0


def _draw(file: str, batches: list[int], epochs: list[float], grid: Any) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("FC940 --plot: pip install matplotlib") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for batch, row in zip(batches, grid, strict=True):
        axes.plot(epochs, [each.epsilon for each in row], marker="o", label=f"batch {batch:,}")
    axes.set(xlabel="epochs", ylabel=f"ε at δ = {grid[0][0].delta:g}", xscale="log")
    axes.legend()
    figure.savefig(file)
    print(f"\n{file}")


def _audit(args: argparse.Namespace) -> int:
    import torch

    from flash_clipping import auditing

    told = _json(args.file)
    if not isinstance(told, dict):
        raise InvalidValue(f"FC932 found a {type(told).__name__}; expected an object of names.")
    missing = [n for n in ("scores", "included", "epsilon", "delta") if n not in told]
    if missing:
        raise InvalidValue(
            f"FC932 found no {', '.join(missing)}; expected scores, included, epsilon and delta."
        )
    found = auditing.audit(
        torch.tensor(told["scores"]),
        torch.tensor(told["included"], dtype=torch.bool),
        **_options(args, "file") | {name: float(told[name]) for name in ("epsilon", "delta")},
    )
    _show(found.to_dict(), found, args)
    return 1 if found.violated else 0


def load_factory(name: str) -> tuple[Any, Any, Callable[..., Any] | None]:
    """Import ``module:factory``, call it, and look at what it returns.

    Raises:
        FactoryError: anything about it that is not as documented.
    """
    from torch import nn

    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise FactoryError(
            f"FC920 expected MODULE:FACTORY, found {name!r}; e.g. my_project.train:factory for the "
            "function factory in my_project/train.py."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise FactoryError(f"FC920 cannot import {module_name!r}: {_where(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found))
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise FactoryError(f"FC920 found no {attribute!r} in {module_name!r}.{hint}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise FactoryError(
            f"FC920 {name} is a {type(found).__name__}; expected a function without arguments that "
            "returns (model, batch) or (model, batch, loss)."
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise FactoryError(
            f"FC920 {name} must be callable without arguments, and {error}. Wrap it in a function "
            "that passes them."
        ) from error
    except ValueError:  # not all callables have a signature
        pass
    try:
        made = found()
    except Exception as error:
        raise FactoryError(f"FC920 {name}() failed: {_where(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise FactoryError(
            f"FC920 {name}() returned a {type(made).__name__}{size}; expected the tuple (model, "
            "batch) or (model, batch, loss)."
        )
    model, batch, loss = (*made, None)[:3]
    if not isinstance(model, nn.Module):
        raise FactoryError(
            f"FC920 {name}() returned a {type(model).__name__} as model; expected an nn.Module "
            "first, then the batch."
        )
    if hasattr(model, "autograd_grad_sample_hooks"):
        raise FactoryError(
            f"FC172 {name}() returned a model that is wrapped for per-sample gradients already; "
            "return the plain nn.Module, before make_private."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise FactoryError(f"FC305 {name}() returned a model without a trainable parameter.")
    if loss is not None and not callable(loss):
        raise FactoryError(
            f"FC920 {name}() returned a {type(loss).__name__} as loss; expected loss(model, batch)."
        )
    return model, batch, loss


def _where(error: BaseException) -> str:
    """The error and the line of the user's own file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
    own = [f for f in own if f"{os.sep}importlib{os.sep}" not in f.filename] or own
    text = f"{type(error).__name__}: {error}"
    return f"{text} (line {own[-1].lineno} of {own[-1].filename})" if own else text


if __name__ == "__main__":
    sys.exit(main())
