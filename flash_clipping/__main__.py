"""The command ``flash-clipping`` (also ``python -m flash_clipping``)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_clipping import __version__
from flash_clipping.codes import entries, entry
from flash_clipping.errors import InvalidValue, checked_number

# PyTorch takes seconds to import: commands import what they use, and --help does without.

_DTYPES = ("float64", "float32", "bfloat16", "float16")

_METHODS = ("plain", "private", "graphs", "two_pass")

#: What is no error of the command, but of its arguments and files.
_REFUSALS = (ArithmeticError, ImportError, OSError, RuntimeError, TypeError, ValueError)

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

_PLAN_DESCRIPTION = """\
The noise that an epsilon needs, or the epsilon that a noise has; then the epsilon of other batch
sizes and epochs at that noise.
"""

_COMPOSE_DESCRIPTION = """\
Compose the privacy of several runs on one dataset, which gives less than the sum of their epsilons.
Exit status: 0, or 2 when a file cannot be used.
"""

_LOGGER = logging.getLogger("flash_clipping.diagnostics.command")

#: What a command gives: its exit status and report, for JSON; then the same in lines of text.
_Found = Iterator[Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = argparse.Namespace(refusals=())
    try:
        try:
            found = _parser().parse_args(argv, args).run(args)
            _speak(args.quiet)
            if args.command != "errors" and sys.stderr.isatty() and "torch" not in sys.modules:
                _tell("loading PyTorch")
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                status, report = next(found)
                for line in [json.dumps(report, indent=2)] if args.json else found:
                    print(line)
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
    return int(status)


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


def _options(args: argparse.Namespace, *others: str) -> dict[str, Any]:
    """What a function of the library takes of these, by the same names."""
    others = ("command", "run", "refusals", "json", "quiet", *others)
    return {name: value for name, value in vars(args).items() if name not in others}


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


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

    def command(run: Any, refusals: Any, help: str, text: str = "", *parents: Any) -> Any:
        made = commands.add_parser(
            run.__name__.strip("_"),
            parents=[*parents, of_all],
            help=help,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run, refusals=refusals)
        return made.add_argument

    words = "compare a model's norms and clipped sums with a float64 oracle"
    add = command(_check, InvalidValue, words, _CHECK_DESCRIPTION, of_model)
    add("--mode", choices=("one_pass", "two_pass", "one_by_one"), default="one_pass")
    add("--tolerance", type=float, help="relative error allowed")
    add("--max-grad-norm", type=float, help="C; default: the median norm")
    add("--removals", type=int, default=16, help="how many samples to remove, one at a time")
    add("--seed", type=int, default=0)

    words = "what privacy costs a model on this machine: time, memory, first step"
    add = command(_bench, InvalidValue, words, _BENCH_DESCRIPTION, of_model)
    add("--method", choices=_METHODS, action="append", help="default: all of them")
    add("--rounds", type=int, default=3, help="turns of each method")
    add("--steps", type=int, default=10, help="that are timed in a turn")

    words = "what noise an epsilon needs, and what batches and epochs cost"
    add = command(_plan, _REFUSALS, words, _PLAN_DESCRIPTION)
    add("--samples", "--dataset-size", type=int, required=True, help="in the dataset")
    add("--batch-size", type=int, required=True, help="expected, of a step")
    add("--epochs", type=float, help="or --steps: one of them")
    add("--steps", type=int)
    add("--epsilon", type=float, help="or --noise-multiplier: one of them")
    add("--noise-multiplier", type=float)
    add("--delta", type=float, help="default: a tenth of 1 / samples")
    add("--accountant", default="prv", choices=("prv", "rdp", "gdp", "pld"))
    add("--max-physical-batch-size", type=int, help="what fits on the device")
    add("--parameters", type=int, help="trainable ones, for noise over signal")
    add("--plot", metavar="FILE", help="draw the table of epsilon (needs matplotlib)")

    words = "a lower bound on epsilon, from scores of canaries"
    add = command(_audit, _REFUSALS, words, _AUDIT_DESCRIPTION)
    add("file", metavar="FILE", help="JSON, as above")
    add("--guesses", type=int, required=True, help="canaries not to abstain on")
    add("--confidence", type=float, default=0.95)

    words = "describe the installation, for a bug report"
    command(_env, _REFUSALS, words, "Print versions, devices, Triton's state and settings as JSON.")

    words = "epsilon of several runs on one dataset, from their reports"
    add = command(_compose, _REFUSALS, words, _COMPOSE_DESCRIPTION)
    add("reports", metavar="FILE", nargs="+", help="JSON of engine.report(delta)")
    add("--delta", type=float, help="by default that of the reports")

    add = command(_errors, InvalidValue, "what a code of an error or a warning means")
    add("code", metavar="CODE", nargs="?", help="e.g. FC101; without, all of them")
    return parser


def _check(args: argparse.Namespace) -> _Found:
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
    yield 0 if report.passed else 1, report.to_dict()
    yield report


def _bench(args: argparse.Namespace) -> _Found:
    from flash_clipping.diagnostics.bench import bench, table

    for name in ("rounds", "steps"):
        checked_number(name, getattr(args, name), "[1, inf)", example=3)
    options = _options(args, "factory", "device", "dtype", "method", "rounds", "steps")
    given = args.factory, args.device, args.dtype, args.steps, options
    costs, without = bench(args.method or _METHODS, args.rounds, _tell, *given)
    yield 0, {"costs": costs, "without": without}
    yield from _aligned(table(costs))
    yield from (f"{method}: {why}" for method, why in without.items())


def _plan(args: argparse.Namespace) -> _Found:
    from flash_clipping import planning

    _tell(f"computing the noise and epsilon of this plan ({args.accountant})")
    shown = ("max_physical_batch_size", "parameters", "plot")
    found = planning.plan(**_options(args, *shown))
    yield 0, found.to_dict()
    yield from _aligned(found.rows(args.max_physical_batch_size, args.parameters))
    batches = [found.batch_size // 2, found.batch_size, 2 * found.batch_size]
    batches = [b for b in batches if 0 < b <= found.samples]
    epochs = [found.epochs * times for times in (0.5, 1, 2, 4)]
    _tell(f"computing epsilon of {len(batches) * len(epochs)} other plans")
    grid = found.over(batches, epochs)
    yield f"\nε at σ = {found.noise_multiplier:.4g}, by expected batch and epochs"
    yield f"{'':>10}" + "".join(f"{count:>10.3g}" for count in epochs)
    for batch, row in zip(batches, grid, strict=True):
        yield f"{batch:>10,}" + "".join(f"{each.epsilon:>10.3g}" for each in row)
    if not found.delta_is_small:
        _warn(
            f"δ = {found.delta:.3g} is not below 1 / {found.samples:,}: to publish one sample as "
            f"it is, chosen at random, has such a δ. Take --delta {0.1 / found.samples:.1g}."
        )
    if args.plot:
        _draw(args.plot, batches, epochs, grid, args.epsilon)
        yield f"\n{args.plot}"


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


def _audit(args: argparse.Namespace) -> _Found:
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
    yield 1 if found.violated else 0, found.to_dict()
    yield found


def _env(args: argparse.Namespace) -> _Found:
    from flash_clipping import diagnostics

    report = diagnostics.environment()
    yield 0, report
    yield json.dumps(report, indent=2)


def _compose(args: argparse.Namespace) -> _Found:
    from flash_clipping.noise.report import compose

    reports = [_json(path) for path in args.reports]
    _tell(f"composing {len(reports)} reports")
    report = compose(reports, delta=args.delta)
    yield 0, report
    rows = [("accountant", "ε", "")]
    for accountant, found in report["epsilon"].items():
        epsilon = "-" if found["epsilon"] is None else f"{found['epsilon']:.4g}"
        rows.append((accountant, epsilon, found["why"] or "a bound"))
    yield from _aligned(rows)
    yield f"\nδ = {report['delta']:.3g}; {report['relation']}; {report['unit']}"
    for kind in ("assumptions", "violated", "seeds"):
        yield from (f"{kind}: {text}" for text in report[kind])


def _errors(args: argparse.Namespace) -> _Found:
    found = [entry(args.code)] if args.code else entries()
    yield 0, [asdict(one) for one in found]
    yield from found if args.code else (f"{one.code} {one.message}" for one in found)


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(f"FC932 {path}: found no JSON ({error}).") from error


if __name__ == "__main__":
    sys.exit(main())
