"""`dpkfc train`: train a private model on the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dpkfc.app.cli import options


def train(
    source: options.Source,
    epsilon: options.Epsilon,
    target: options.Target = None,
    schema: options.SchemaFile = None,
    text: options.TextColumn = None,
    classes: options.Classes = None,
    model: options.Model = None,
    out: options.Out = None,
    test: options.Test = "0.2",
    limits: options.Limits = None,
    size: options.Size = 32,
    grey: options.Grey = False,
    text_features: options.TextFeatures = 4096,
    indicators: options.Indicators = False,
    data_dir: options.DataDir = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Expected passes over the data.",
            show_default="15",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    batch_size: options.BatchSize = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="The learning rate.",
            show_default="from --rho",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(
            help="Sets the learning rate by the norm of the noise in the weights of one unit.",
            show_default="2",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            help="The clip norm of preconditioned gradients.",
            show_default="1",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    method: options.Method = "kfc",
    noise: options.NoiseKind = "auto",
    delta: options.Delta = None,
    ledger: options.LedgerFile = None,
    dataset: options.DatasetName = None,
    budget: options.Budget = None,
    records: options.RecordCount = None,
    physical_batch_size: options.PhysicalBatchSize = 512,
    device: options.Device = "cpu",
    seed: options.Seed = None,
) -> None:
    """Train a model privately on your own data.

    Settings that are not given come from a recipe that looks at no record. Ctrl-C stops the run
    after the current step; the same command resumes it, bit for bit. Epsilon covers the weights.
    It does not cover the accuracy on the test records.

    [bold]Examples[/bold]

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3[/cyan]

    [cyan]dpkfc train reviews.csv --text review --target stars --classes 5 --epsilon 3[/cyan]

    [cyan]dpkfc train photos/ --epsilon 3 --ledger privacy.db --dataset patients --budget 8[/cyan]

    [cyan]dpkfc train scans.npz --model net.py:network --epochs 30 --epsilon 1[/cyan]

    [cyan]dpkfc train reviews/ --model lora:models/minilm --epsilon 3[/cyan]
    """
    from dpkfc.app.workflow.fit import fit
    from dpkfc.app.workflow.release import finish
    from dpkfc.app.workflow.run_folder import check_folder
    from dpkfc.app.workflow.settings import Settings, check_settings, parse_budget

    console = Console()
    arguments = options.load_arguments(
        target=target,
        text=text,
        schema=schema,
        classes=classes,
        test=test,
        limits=limits,
        size=size,
        grey=grey,
        text_features=text_features,
        indicators=indicators,
        data_dir=data_dir,
        model=model,
    )
    settings = Settings(
        epsilon=epsilon,
        delta=delta,
        model=model,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        rho=rho,
        clip=clip,
        method=method,
        noise=noise,
        physical_batch_size=physical_batch_size,
        ledger=None if ledger is None else str(ledger),
        dataset=None if ledger is None else dataset or options.run_name(source),
        budget=None if budget is None else parse_budget(budget),
        records=records,
        seed=seed,
        device=device,
    )
    check_settings(settings)
    out = out or Path("runs") / options.run_name(source)
    check_folder(out)
    loaded = options.load_source(source, arguments, console)
    options.show_remarks(loaded, seed, console, records)
    try:
        finished = fit(loaded, settings, out, console=console)
    except KeyboardInterrupt:  # a second Ctrl-C, or one before the first step or after the last
        finished = False
    if not finished:
        _say_stopped(out, console)
        raise typer.Exit(130)
    finish(out, console)


def _say_stopped(out: Path, console: Console) -> None:
    if (out / "config.json").exists():
        state = f"everything is in {out}. The same command resumes the run"
    else:
        state = "nothing was begun or spent"
    console.print(Text(f"stopped; {state}."), soft_wrap=True)
