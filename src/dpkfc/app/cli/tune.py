"""`dpkfc tune`: the best settings for data of one's own. Free if the data is public; else epsilon covers the choice."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dpkfc.app.cli import train as options
from dpkfc.app.reports.plain_warnings import plainly_warned
from dpkfc.errors import PrivacyError

if TYPE_CHECKING:
    from dpkfc.app.workflow.tune import Spread

RHO = "0.5,8"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(plainly_warned(tune))


def tune(
    source: options.Source,
    epsilon: Annotated[
        float,
        typer.Option(
            help="The privacy budget; of private data, for all of the tuning.", show_default=False
        ),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="The data is public: tuning is free.")
    ] = False,
    tries: Annotated[
        float | None,
        typer.Option(
            help="How many; of private data how many are expected.", show_default="20, or 10"
        ),
    ] = None,
    rho: Annotated[
        str | None,
        typer.Option(
            help="The noise length: LOW,HIGH to choose from, or a number.", show_default=RHO
        ),
    ] = None,
    lr: Annotated[
        str | None, typer.Option(help="The learning rate instead of --rho, in the same form.")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(help="The clip, in the same form.", show_default="1")
    ] = None,
    epochs: Annotated[
        str | None,
        typer.Option(help="Passes over the data; LOW,HIGH with --public only.", show_default="15"),
    ] = None,
    validation: Annotated[
        str,
        typer.Option(
            help="The share of the records that tries are scored on, or a file or folder of public records."
        ),
    ] = "0.2",
    score_noise: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the noise on the score.", show_default="50 / epsilon"
        ),
    ] = None,
    target: options.Target = None,
    text: options.TextColumn = None,
    schema: options.SchemaFile = None,
    classes: options.Classes = None,
    test: options.Test = "0.2",
    limits: options.Limits = None,
    size: options.Size = 32,
    grey: options.Grey = False,
    text_features: options.TextFeatures = 4096,
    indicators: options.Indicators = False,
    data_dir: options.DataDir = None,
    model: options.Model = None,
    delta: options.Delta = None,
    batch_size: options.BatchSize = None,
    method: options.Method = "kfc",
    noise: options.NoiseKind = "auto",
    physical_batch_size: options.PhysicalBatchSize = 512,
    ledger: options.LedgerFile = None,
    dataset: options.DatasetName = None,
    budget: options.Budget = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the tuning.", show_default="runs/SOURCE's name-tuning"),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = "cpu",
) -> None:
    """Choose settings for training on your own data, by trying.

    On private data the choice has a price. A random number of tries is made, and the best is all that there is to see:
    a private model and its report, as dpkfc train leaves them. Epsilon covers all of it. On public data every try is
    shown, and the best settings serve for private data of the same kind. The same command goes on after an
    interruption.

    [bold]Examples[/bold]

    [cyan]dpkfc tune people.csv --target ill --schema schema.json --epsilon 3 --ledger privacy.db[/cyan]

    [cyan]dpkfc tune people.csv --target ill --schema schema.json --epsilon 3 --ledger privacy.db --budget 8[/cyan]

    [cyan]dpkfc tune scans.npz --epsilon 3 --rho 1,4 --clip 0.3,3 --validation public-scans.npz[/cyan]

    [cyan]dpkfc tune fashion-mnist --public --epsilon 3 --tries 30 --epochs 5,40[/cyan]
    """
    if find_spec("optuna") is None:
        raise PrivacyError("tuning needs Optuna, which is not installed: pip install 'dpkfc[tune]'")
    from dpkfc.app.workflow import fit as training
    from dpkfc.app.workflow import tune as tuning_runs
    from dpkfc.app.workflow.run_folder import locked

    console, name = Console(), options.name_of(source)
    fixed, space = _space(rho, lr, clip, epochs)
    if public and not (ledger is None and budget is None and score_noise is None):
        raise PrivacyError(
            "--public says that the data needs no protection: leave out --ledger, --budget and --score-noise"
        )
    if not public and "epochs" in space:
        raise PrivacyError(
            "--epochs: the price is that of a fixed number of steps. Give one number, or tune --public"
        )
    settings = training.Settings(
        epsilon=epsilon,
        delta=delta,
        model=model,
        batch_size=batch_size,
        **fixed,
        method=method,
        noise=noise,
        physical_batch_size=physical_batch_size,
        ledger=None if ledger is None else str(ledger),
        dataset=(dataset or name) if ledger is not None else None,
        budget=None if budget is None else training.read_budget(budget),
        seed=seed,
        device=device,
    )
    training.check(settings)
    tries = tuning_runs.read_tries(tries, public)
    chosen = options.options_of(
        target,
        text,
        schema,
        classes,
        test,
        limits,
        size,
        grey,
        text_features,
        indicators,
        data_dir,
        model,
    )
    out = out or Path("runs") / f"{name}-tuning"
    with locked(out):
        loaded = options.load_source(source, chosen, console)
        options.show_remarks(loaded, None if public else seed, console)
        held_out = tuning_runs.hold_out(
            loaded,
            validation,
            lambda path: options.load_source(path, {**chosen, "test": 0}, console),
        )
        work = tuning_runs.prepare(held_out, settings, space, console)
        spreads = {name: str(spread) for name, spread in space.items()}
        asked = {
            "public": public,
            "space": spreads,
            "validation": validation,
            "score_noise": score_noise,
        }
        config = {
            "settings": {**asdict(settings), "model": work.built.name},
            "tuning": {**asked, **({} if public else {"tries": tries})},
            "code": work.built.code,
            "source": dict(loaded.source),
            "shape": list(loaded.shape),
            "classes": list(loaded.names),
        }
        try:
            if public:
                tuning_runs.publicly(work, int(tries), config, out, console)
            else:
                tuning_runs.privately(work, tries, score_noise, config, out, console)
        except KeyboardInterrupt:
            console.print(
                f"stopped; everything is in {out}. The same command goes on from here.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None


def _space(
    rho: str | None, lr: str | None, clip: str | None, epochs: str | None
) -> tuple[dict[str, Any], dict[str, Spread]]:
    """What is given as one number, and what is chosen from a range, by name."""
    from dpkfc.app.workflow.tune import Spread

    if rho is not None and lr is not None:
        raise PrivacyError("--lr and --rho both say how large steps are: give one of them")
    texts = {
        "rho": RHO if rho is None and lr is None else rho,
        "lr": lr,
        "clip": clip,
        "epochs": epochs,
    }
    found = {name: Spread.parse(name, text) for name, text in texts.items() if text is not None}
    space = {name: spread for name, spread in found.items() if spread.tuned}
    if not space:
        raise PrivacyError(
            "there is nothing to choose: give LOW,HIGH for --rho, --lr, --clip or --epochs"
        )
    return {name: spread.low for name, spread in found.items() if not spread.tuned}, space
