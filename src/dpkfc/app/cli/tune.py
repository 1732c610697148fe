"""`dpkfc tune`: choose settings by trying. Free on public data, covered by epsilon on private."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dpkfc.app.cli import options

if TYPE_CHECKING:
    from dpkfc.app.workflow.search_space import Interval
    from dpkfc.app.workflow.settings import Settings
    from dpkfc.app.workflow.tuning_job import TuningJob

DEFAULT_RHO = "0.5,8"
TUNING = "Tuning"


def tune(
    source: options.Source,
    epsilon: Annotated[
        float,
        typer.Option(
            help="The privacy budget; on private data, that of the whole tuning.",
            show_default=False,
        ),
    ],
    target: options.Target = None,
    schema: options.SchemaFile = None,
    text: options.TextColumn = None,
    classes: options.Classes = None,
    model: options.Model = None,
    public: Annotated[
        bool, typer.Option("--public", help="The data is public: tuning is free.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the tuning.", show_default="runs/SOURCE's name-tuning"),
    ] = None,
    tries: Annotated[
        float | None,
        typer.Option(
            help="The number of tries; on private data, the expected number.",
            show_default="20 on public data, 10 on private data",
            rich_help_panel=TUNING,
        ),
    ] = None,
    rho: Annotated[
        str | None,
        typer.Option(
            help="Sets the learning rate by the norm of the noise in the weights of one unit: "
            "LOW,HIGH to choose from, or one number.",
            show_default=DEFAULT_RHO,
            rich_help_panel=TUNING,
        ),
    ] = None,
    lr: Annotated[
        str | None,
        typer.Option(
            help="The learning rate, instead of --rho, in the same form.", rich_help_panel=TUNING
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            help="The clip norm, in the same form.", show_default="1", rich_help_panel=TUNING
        ),
    ] = None,
    epochs: Annotated[
        str | None,
        typer.Option(
            help="Expected passes over the data; LOW,HIGH with --public only.",
            show_default="15",
            rich_help_panel=TUNING,
        ),
    ] = None,
    validation: Annotated[
        str,
        typer.Option(
            help="The share of the records on which tries are scored, or a file or folder of "
            "public records.",
            rich_help_panel=TUNING,
        ),
    ] = "0.2",
    score_noise: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the noise on the score.",
            show_default="50 / epsilon",
            rich_help_panel=TUNING,
        ),
    ] = None,
    test: options.Test = "0.2",
    limits: options.Limits = None,
    size: options.Size = 32,
    grey: options.Grey = False,
    text_features: options.TextFeatures = 4096,
    indicators: options.Indicators = False,
    data_dir: options.DataDir = None,
    batch_size: options.BatchSize = None,
    method: options.Method = "kfc",
    noise: options.NoiseKind = "auto",
    delta: options.Delta = None,
    ledger: options.LedgerFile = None,
    dataset: options.DatasetName = None,
    budget: options.Budget = None,
    physical_batch_size: options.PhysicalBatchSize = 512,
    device: options.Device = "cpu",
    seed: options.Seed = None,
) -> None:
    """Choose settings for training on your own data, by trying.

    On private data the choice has a price. The number of tries is random, and only the best try
    is released: a private model with its report, as from dpkfc train. Epsilon covers the whole
    tuning. On public data every try is shown, and the best settings can be used for private data
    of the same kind. After an interruption, the same command resumes.

    [bold]Examples[/bold]

    [cyan]dpkfc tune people.csv --target ill --schema schema.json --epsilon 3[/cyan]

    [cyan]dpkfc tune scans.npz --epsilon 3 --rho 1,4 --clip 0.3,3 --validation public.npz[/cyan]

    [cyan]dpkfc tune fashion-mnist --public --epsilon 3 --tries 30 --epochs 5,40[/cyan]
    """
    if find_spec("optuna") is None:
        raise ImportError("tuning needs Optuna, which is not installed: pip install 'dpkfc[tune]'")
    from dpkfc.app.workflow.run_folder import locked
    from dpkfc.app.workflow.settings import Settings, check_settings, parse_budget
    from dpkfc.app.workflow.tune_privately import tune_privately
    from dpkfc.app.workflow.tune_publicly import tune_publicly
    from dpkfc.app.workflow.tuning_job import check_tries, hold_out, prepare

    console = Console()
    name = options.run_name(source)
    fixed, space = _parse_space(rho, lr, clip, epochs)
    if public and not (ledger is None and budget is None and score_noise is None):
        raise ValueError(
            "--public says that the data needs no protection: omit --ledger, --budget and "
            "--score-noise"
        )
    if not public and "epochs" in space:
        raise ValueError(
            f"--epochs {epochs}: on private data the price is that of a fixed number of steps: "
            "give one number, or tune with --public"
        )
    settings = Settings(
        epsilon=epsilon,
        delta=delta,
        model=model,
        batch_size=batch_size,
        **fixed,
        method=method,
        noise=noise,
        physical_batch_size=physical_batch_size,
        ledger=None if ledger is None else str(ledger),
        dataset=None if ledger is None else dataset or name,
        budget=None if budget is None else parse_budget(budget),
        seed=seed,
        device=device,
    )
    check_settings(settings)
    tries = check_tries(tries, public)
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
    out = out or Path("runs") / f"{name}-tuning"
    with locked(out):
        loaded = options.load_source(source, arguments, console)
        options.show_remarks(loaded, None if public else seed, console)
        held_out = hold_out(
            loaded,
            validation,
            lambda path: options.load_source(path, {**arguments, "test": 0}, console),
        )
        job = prepare(held_out, settings, space, console)
        requested = {
            "public": public,
            "space": {name: str(interval) for name, interval in space.items()},
            "validation": validation,
            "score_noise": score_noise,
            **({} if public else {"tries": tries}),
        }
        config = _config(settings, requested, job)
        try:
            if public:
                tune_publicly(job, int(tries), config, out, console)
            else:
                tune_privately(job, tries, score_noise, config, out, console)
        except KeyboardInterrupt:
            console.print(
                f"stopped; everything is in {out}. The same command resumes the tuning.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None


def _config(settings: Settings, requested: dict[str, Any], job: TuningJob) -> dict[str, Any]:
    """config.json of the tuning."""
    return {
        "settings": {**asdict(settings), "model": job.built.name},
        "tuning": requested,
        "code": job.built.code,
        "source": dict(job.loaded.source),
        "shape": list(job.loaded.shape),
        "classes": list(job.loaded.names),
    }


def _parse_space(
    rho: str | None, lr: str | None, clip: str | None, epochs: str | None
) -> tuple[dict[str, Any], dict[str, Interval]]:
    """The settings that are given as one number, and the intervals of those to choose."""
    from dpkfc.app.workflow.search_space import Interval

    if rho is not None and lr is not None:
        raise ValueError("--lr and --rho both set the size of the steps: give one of them")
    texts = {
        "rho": DEFAULT_RHO if rho is None and lr is None else rho,
        "lr": lr,
        "clip": clip,
        "epochs": epochs,
    }
    intervals = {
        name: Interval.parse(name, text) for name, text in texts.items() if text is not None
    }
    space = {name: interval for name, interval in intervals.items() if interval.is_tuned}
    if not space:
        raise ValueError(
            "there is nothing to choose: give LOW,HIGH for --rho, --lr, --clip or --epochs"
        )
    fixed = {name: interval.low for name, interval in intervals.items() if not interval.is_tuned}
    return fixed, space
