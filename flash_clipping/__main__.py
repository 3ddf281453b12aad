"""The command ``flash-clipping`` (also ``python -m flash_clipping``)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from flash_clipping import __version__
from flash_clipping.codes import entries, entry
from flash_clipping.errors import InvalidValue, checked_number

# PyTorch takes seconds to import: commands import what they use, and --help does without.

_DTYPES = ("float64", "float32", "bfloat16", "float16")

_METHODS = ("plain", "private", "graphs", "two_pass")

_FACTORY_DESCRIPTION = """\
The factory is a function without arguments that returns (model, batch) or (model, batch, loss):

  model  a plain nn.Module, on its device, not wrapped
  batch  a tensor, or tensors in a tuple, list or dict; axis 0 counts the samples. Without a loss
         it is the model's input: a tuple or list positionally, a dict by keyword
  loss   loss(model, batch) returns one loss per sample, [B], or a scalar reduced over the samples
         by --loss-reduction; it sees the whole batch, labels included

The current directory is importable.
"""

_CHECK_DESCRIPTION = f"""\
Compare flash clipping on one batch with per-sample gradients taken in float64, parameter by
parameter, and see whether samples are independent of each other. A few samples of a real batch are
enough: the oracle runs one sample at a time. Exit status: 0 when everything agrees, 1 when anything
fails, 2 when the factory cannot be used.

{_FACTORY_DESCRIPTION}"""

_BENCH_DESCRIPTION = f"""\
Measure training steps of the model on this machine: time, the host's part of it on a GPU, the first
step, and peak memory. Methods take turns, each turn in a process of its own. Exit status: 0, or 2
when a method cannot be used.

  plain     without privacy: forward, backward and AdamW
  private   with clipping and noise, as make_private makes it
  graphs    the same, replayed as CUDA graphs (cuda_graphs="auto"); on a GPU only
  two_pass  less memory and more time (mode="two_pass")

{_FACTORY_DESCRIPTION}"""

_AUDIT_DESCRIPTION = """\
Compare what a training run shows of its canaries with the epsilon that was promised
(flash_clipping.auditing). Exit status: 0 when nothing contradicts it, 1 when the run leaked more, 2
when the file cannot be used. The file:

  {"scores": [0.1, ...], "included": [true, ...], "epsilon": 3.0, "delta": 1e-5}

  scores    of every canary, higher where it looks as if it were in the training data
  included  whether it was, by a fair coin
"""


_LOGGER = logging.getLogger("flash_clipping.diagnostics.command")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = argparse.Namespace(refusals=())
    try:
        try:
            run = _parser().parse_args(argv, args).run
            _speak(args.quiet)
            if args.command != "errors" and sys.stderr.isatty() and "torch" not in sys.modules:
                _tell("loading PyTorch")
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                status: int = run(args)
        finally:
            sys.stdout.flush()
            logging.getLogger("flash_clipping.diagnostics").handlers.clear()
    except BrokenPipeError:  # whoever read the output (head) has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as of a process that SIGPIPE has ended
    except KeyboardInterrupt:
        return 128 + 2
    except args.refusals as error:
        place = f" {args.file}:" if "file" in args else ""
        text = _with_flags(str(error).replace(f"{args.command}: ", "", 1), args)
        print(f"flash-clipping {args.command}:{place} {text}", file=sys.stderr)
        return 2
    return status


def _speak(quiet: bool) -> None:
    """Progress goes to the standard error; the result alone is on the standard output."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("flash-clipping: %(message)s ..."))
    logger = logging.getLogger("flash_clipping.diagnostics")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def _tell(doing: str) -> None:
    """What the command does, for who waits for it."""
    _LOGGER.info(doing)


def _warn(message: object, *_: object, **__: object) -> None:
    print(f"flash-clipping: warning: {message}", file=sys.stderr)


def _with_flags(text: str, args: argparse.Namespace) -> str:
    """A message of the library, with flags in the place of its arguments."""
    for name in _options(args, "factory", "file", "reports"):
        flag = f"--{name}".replace("_modules", "").replace("_", "-")
        text = re.sub(rf"^(FC\d+ )?{name}(?=: )", rf"\1{flag}", text)
        text = re.sub(rf"\b{name}=", f"{flag} ", text)
    return text


def _show(report: dict[str, Any], text: object, args: argparse.Namespace) -> None:
    print(json.dumps(report, indent=2) if args.json else text)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first row has the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flash-clipping", description="Flash Clipping's tools.")
    parser.add_argument("--version", action="version", version=f"flash-clipping {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    of_all = argparse.ArgumentParser(add_help=False)
    of_all.add_argument("--json", action="store_true", help="print the result as JSON")
    of_all.add_argument("--quiet", action="store_true", help="do not tell what is being done")
    of_model = argparse.ArgumentParser(add_help=False)
    of_model.add_argument("factory", metavar="MODULE:FACTORY", help="e.g. my_project.train:factory")
    of_model.add_argument("--loss-reduction", choices=("mean", "sum"), default="mean")
    of_model.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    of_model.add_argument(
        "--batch-second", dest="batch_first", action="store_false", help="samples are axis 1"
    )
    of_model.add_argument(
        "--folded",
        dest="folded_modules",
        metavar="PATTERN",
        action="append",
        default=[],
        help="modules whose rows are parts of samples (folded_modules); may be repeated",
    )
    of_model.add_argument(
        "--no-strict", dest="strict", action="store_false", help="accept buffers that change"
    )
    of_model.add_argument("--dtype", choices=_DTYPES, help="cast model and batch first")
    of_model.add_argument("--device", help="move model and batch there first")
    check = commands.add_parser(
        "check",
        parents=[of_model, of_all],
        help="compare a model's norms and clipped sums with a float64 oracle",
        description=_CHECK_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes = ("one_pass", "two_pass", "one_by_one")
    check.add_argument("--mode", choices=modes, default="one_pass")
    check.add_argument("--tolerance", type=float, help="relative error allowed")
    check.add_argument("--max-grad-norm", type=float, help="C; default: the median norm")
    check.add_argument(
        "--removals", type=int, default=16, help="how many samples to remove, one at a time"
    )
    check.add_argument("--seed", type=int, default=0)
    check.set_defaults(run=_check, refusals=(InvalidValue,))
    bench = commands.add_parser(
        "bench",
        parents=[of_model, of_all],
        help="what privacy costs a model on this machine: time, memory, first step",
        description=_BENCH_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("--method", choices=_METHODS, action="append", help="default: all of them")
    bench.add_argument("--rounds", type=int, default=3, help="turns of each method")
    bench.add_argument("--steps", type=int, default=10, help="that are timed in a turn")
    bench.set_defaults(run=_bench, refusals=(InvalidValue,))
    plan = commands.add_parser(
        "plan",
        parents=[of_all],
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
    plan.set_defaults(run=_plan, refusals=(ArithmeticError, ImportError, OSError, ValueError))
    audit = commands.add_parser(
        "audit",
        parents=[of_all],
        help="a lower bound on epsilon, from scores of canaries",
        description=_AUDIT_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit.add_argument("file", metavar="FILE", help="JSON, as above")
    audit.add_argument("--guesses", type=int, required=True, help="canaries not to abstain on")
    audit.add_argument("--confidence", type=float, default=0.95)
    audit.set_defaults(
        run=_audit, refusals=(ArithmeticError, OSError, RuntimeError, TypeError, ValueError)
    )
    env = commands.add_parser(
        "env",
        parents=[of_all],
        help="describe the installation, for a bug report",
        description="Print versions, devices, Triton's state and settings, for a bug report.",
    )
    env.set_defaults(run=_env, refusals=())
    composed = commands.add_parser(
        "compose",
        parents=[of_all],
        help="epsilon of several runs on one dataset, from their reports",
        description="Compose the privacy of several runs on one dataset, which gives less than the "
        "sum of their epsilons. Exit status: 0, or 2 when a file cannot be used.",
    )
    composed.add_argument("reports", metavar="FILE", nargs="+", help="JSON of engine.report(delta)")
    composed.add_argument("--delta", type=float, help="by default that of the reports")
    composed.set_defaults(run=_compose, refusals=(ArithmeticError, OSError, ValueError))
    errors = commands.add_parser(
        "errors", parents=[of_all], help="what a code of an error or a warning means"
    )
    errors.add_argument("code", metavar="CODE", nargs="?", help="e.g. FC101; without, all of them")
    errors.set_defaults(run=_errors, refusals=(InvalidValue,))
    return parser


def _env(args: argparse.Namespace) -> int:
    from flash_clipping import diagnostics

    print(json.dumps(diagnostics.environment(), indent=2))
    return 0


def _compose(args: argparse.Namespace) -> int:
    from flash_clipping.noise.report import compose

    reports = [_json(path) for path in args.reports]
    _tell(f"composing {len(reports)} reports")
    report = compose(reports, delta=args.delta)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    rows = [("accountant", "ε", "")]
    for accountant, found in report["epsilon"].items():
        epsilon = "-" if found["epsilon"] is None else f"{found['epsilon']:.4g}"
        rows.append((accountant, epsilon, found["why"] or "a bound"))
    _print_table(rows)
    print(f"\nδ = {report['delta']:.3g}; {report['relation']}; {report['unit']}")
    for kind in ("assumptions", "violated", "seeds"):
        for text in report[kind]:
            print(f"{kind}: {text}")
    return 0


def _errors(args: argparse.Namespace) -> int:
    every = "\n".join(f"{one.code} {one.message}" for one in entries())
    print(entry(args.code) if args.code else every)
    return 0


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(f"FC932 {path}: found no JSON ({error}).") from error


def _options(args: argparse.Namespace, *others: str) -> dict[str, Any]:
    """What a function of the library takes of these, by the same names."""
    others = ("command", "run", "refusals", "json", "quiet", *others)
    return {name: value for name, value in vars(args).items() if name not in others}


def _check(args: argparse.Namespace) -> int:
    import torch

    from flash_clipping import Kernels, diagnostics

    # Expected of a model whose first layer takes integers; nothing a reader can act on.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    checked_number("--seed", args.seed, "[-9223372036854775808, 18446744073709551615]", 0)
    torch.manual_seed(args.seed)
    _tell(f"loading {args.factory}")
    options = {**_options(args, "factory", "device", "dtype"), "kernels": Kernels(args.backend)}
    del options["backend"]
    with redirect_stdout(sys.stderr):  # of the user's code, which is no part of the report
        model, batch, loss = diagnostics.load_factory(args.factory, args.device, args.dtype)
        report = diagnostics.check(model, batch, loss, **options)
    _show(report.to_dict(), report, args)
    return 0 if report.passed else 1


def _bench(args: argparse.Namespace) -> int:
    from flash_clipping.diagnostics.bench import bench, table

    for name in ("rounds", "steps"):
        checked_number(name, getattr(args, name), "[1, inf)", example=3)
    options = _options(args, "factory", "device", "dtype", "method", "rounds", "steps")
    given = args.factory, args.device, args.dtype, args.steps, options
    costs, without = bench(args.method or _METHODS, args.rounds, _tell, *given)
    if args.json:
        print(json.dumps({"costs": costs, "without": without}, indent=2))
        return 0
    _print_table(table(costs))
    for method, why in without.items():
        print(f"{method}: {why}")
    return 0


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
        _warn(
            f"δ = {found.delta:.3g} is not below 1 / {found.samples:,}: to publish one sample as "
            f"it is, chosen at random, has such a δ. Take --delta {0.1 / found.samples:.1g}."
        )
    if args.plot:
        _draw(args.plot, batches, epochs, grid, args.epsilon)
    return 0


def _draw(
    file: str, batches: list[int], epochs: list[float], grid: Any, target: float | None
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for batch, row in zip(batches, grid, strict=True):
        axes.plot(epochs, [each.epsilon for each in row], marker="o", label=f"batch {batch:,}")
    if target is not None:
        axes.axhline(target, color="gray", linestyle="--", label=f"--epsilon {target:g}")
    of_all = grid[0][0]
    axes.set(xlabel="epochs", ylabel=f"ε at δ = {of_all.delta:.3g}", xscale="log", ylim=(0, None))
    axes.set_title(f"σ = {of_all.noise_multiplier:.3g}")
    axes.set_xticks(epochs, [f"{count:.3g}" for count in epochs])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file)
    print(f"\n{file}")


def _audit(args: argparse.Namespace) -> int:
    import torch

    from flash_clipping import auditing

    told = _json(args.file)
    names = ("scores", "included", "epsilon", "delta")
    if missing := [n for n in names if not isinstance(told, dict) or n not in told]:
        raise InvalidValue(
            f"FC932 missing key {', '.join(map(repr, missing))}; expected scores, included, "
            "epsilon and delta."
        )
    found = auditing.audit(
        torch.tensor(told["scores"]),
        torch.tensor(told["included"], dtype=torch.bool),
        **_options(args, "file") | {name: float(told[name]) for name in ("epsilon", "delta")},
    )
    _show(found.to_dict(), found, args)
    return 1 if found.violated else 0


if __name__ == "__main__":
    sys.exit(main())
