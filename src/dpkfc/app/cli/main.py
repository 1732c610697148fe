"""The command line: `dpkfc COMMAND`, or `python -m dpkfc COMMAND`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from dpkfc.accounting.ledger import read
from dpkfc.app.cli import train as cli_train
from dpkfc.app.cli import tune as cli_tune
from dpkfc.app.reports.ledger_table import ledger_tables
from dpkfc.app.reports.plain_warnings import plainly_warned
from dpkfc.errors import PrivacyError


class Commands(TyperGroup):
    """Shows a `PrivacyError` of any command, or a file that cannot be used, as one red line, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # of `dpkfc ... | head`: typer's own matter
            raise
        except (PrivacyError, ValueError, TypeError, ImportError, OSError) as error:
            said = (
                f"{error.filename}: {error.strerror}"
                if isinstance(error, OSError) and error.filename
                else error
            )
            Console(stderr=True).print(Text(f"dpkfc: {said}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)
cli_train.register(app)
cli_tune.register(app)


@app.callback()
def dpkfc() -> None:
    """Differentially private training for PyTorch: the geometry put right before the noise.

    [bold]Examples[/bold]

    [cyan]dpkfc demo[/cyan]                 train a small private model, in about a minute

    [cyan]dpkfc train people.csv --target ill --schema schema.json --epsilon 3[/cyan]   train on your own data

    [cyan]dpkfc predict runs/people new.csv[/cyan]   what the trained model says of new records

    [cyan]dpkfc tune people.csv --target ill --schema schema.json --epsilon 3[/cyan]    the same, with settings tuned

    [cyan]dpkfc plan 60000[/cyan]           what noise a run needs, and which kind disturbs the model least

    [cyan]dpkfc ledger privacy.db[/cyan]    what was spent on which data set

    [cyan]dpkfc reproduce bsr-error[/cyan]  the error of correlated noise: tables and a figure
    """


@app.command()
def demo(
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 3.0,
    delta: Annotated[float, typer.Option(help="The probability with which it may fail.")] = 1e-5,
    epochs: Annotated[float, typer.Option(help="Expected passes over the data.")] = 40.0,
    seed: Annotated[
        int | None, typer.Option(help="For a reproducible run; by default noise is secret.")
    ] = None,
    device: cli_train.Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="A folder for the table, a picture and a report.")
    ] = None,
) -> None:
    """Train a small CNN privately on scikit-learn's handwritten digits, and show what it cost and gave.

    [bold]Examples[/bold]

    [cyan]dpkfc demo[/cyan]

    [cyan]dpkfc demo --epsilon 1 --epochs 20 --seed 0 --out runs/demo[/cyan]
    """
    from dpkfc.app.workflow.demo import keep, run_demo
    from dpkfc.app.workflow.fit import check_device, check_seed
    from dpkfc.app.workflow.run_folder import check_folder

    check_device(device)
    check_seed(seed)
    if out is not None:
        check_folder(out)
    console = Console()
    outcomes = run_demo(epsilon, delta, epochs, seed, console, device)
    if out is not None:
        console.print(str(keep(outcomes, delta, out)), soft_wrap=True, highlight=False)


@app.command()
@plainly_warned
def plan(
    records: Annotated[int, typer.Argument(help="Records in the data set.", show_default=False)],
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 1.0,
    delta: Annotated[float, typer.Option(help="The probability with which it may fail.")] = 1e-5,
    epochs: Annotated[float, typer.Option(help="Expected passes over the data.")] = 5.0,
    batch_size: Annotated[int, typer.Option(help="Records a step is expected to draw.")] = 256,
    clip: Annotated[
        float, typer.Option(help="The norm to which each record's gradient is clipped.")
    ] = 1.0,
    momentum: Annotated[float, typer.Option(help="Of torch.optim.SGD.")] = 0.9,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum.")] = False,
    weight_decay: Annotated[
        float, typer.Option(help="Of torch.optim.SGD; matters times the learning rate.")
    ] = 0.0,
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 0.1,
    decoupled: Annotated[
        bool, typer.Option("--decoupled", help="Weight decay apart from the gradient.")
    ] = False,
    max_buffers: Annotated[
        int, typer.Option(help="Copies of the model that noise may keep in memory.")
    ] = 16,
) -> None:
    """Compare independent and correlated noise for a run of SGD, and state the privacy of the best.

    Nothing private is needed for it. In Python, noise="auto" makes the same choice.

    [bold]Examples[/bold]

    [cyan]dpkfc plan 60000 --epochs 5 --batch-size 256 --epsilon 1[/cyan]

    [cyan]dpkfc plan 60000 --epsilon 8 --momentum 0 --max-buffers 2[/cyan]
    """
    from rich.progress import track

    from dpkfc.app.reports.noise_table import noise_table
    from dpkfc.noise.workload import Workload
    from dpkfc.planning.choose_noise import best, evaluate, noise_candidates
    from dpkfc.planning.plan import batches

    console = Console()
    workload = Workload.sgd(momentum, weight_decay, lr=lr, coupled=not decoupled, nesterov=nesterov)
    size, steps = batches(records, batch_size, epochs, None)
    run = {
        "records": records,
        "batch_size": size,
        "steps": steps,
        "clip": clip,
        "epsilon": epsilon,
        "delta": delta,
    }
    tried = track(
        noise_candidates(max_buffers, records // size),
        "calibrating",
        console=console,
        transient=True,
    )
    found = [evaluate(noise, workload, **run) for noise in tried]
    chosen = best(found)
    console.print(noise_table(found, chosen, workload.name))
    console.print(chosen.plan)


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="The ledger's file.", show_default=False)],
    delta: Annotated[
        float | None,
        typer.Option(
            help="The delta at which the total is stated.",
            show_default="the smallest of the data set's runs",
        ),
    ] = None,
) -> None:
    """Show every run in a ledger, and the epsilon that all runs on a data set come to together.

    Each run is shown at its own delta. Below the table stands what nobody checked of a run. The ledger is only read,
    and may be in use.

    [bold]Examples[/bold]

    [cyan]dpkfc ledger privacy.db[/cyan]

    [cyan]dpkfc ledger privacy.db --delta 1e-6[/cyan]
    """
    Console().print(ledger_tables(read(path), delta))


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="The folder of dpkfc train, tune or reproduce.", show_default=False),
    ],
) -> None:
    """Write the report of a run, one HTML file: its privacy in plain words, what it learned, and how.

    Or the report of an experiment: its tables and figures.

    [bold]Examples[/bold]

    [cyan]dpkfc report runs/digits[/cyan]

    [cyan]dpkfc report results/table1[/cyan]
    """
    from dpkfc.app.reports.run_report import write_report

    Console().print(str(write_report(folder)), soft_wrap=True, highlight=False)


EXPERIMENTS = {  # the names of the paper's tables and figures, or of what is compared
    "table1": "optimizers",
    "table2": "transfer",
    "table5": "tasks",
    "table6": "optimizers",
    "table7": "sensitivity",
    "fig1": "layer_snr",
    "fig2": "spectra",
    "fig3": "alignment",
    "fig4": "tasks",
    "fig5": "tasks",
    "fig6": "spectra",
    "fig7": "density",
    "fig8": "alignment",
    "fig9": "alignment",
    "fig10": "sensitivity",
    "fig11": "sensitivity",
    "falsify": "falsify",
    "probe-spectrum": "probe_spectrum",
    "non-stationary": "non_stationary",
    "demo": "demo",
    "geometry": "geometry",
    "correlated": "correlated",
    "bsr-error": "bsr_error",
    "rescaling": "rescaling",
    "preset": "preset",
    "noise-length": "noise_length",
    "clip-and-rate": "clip_and_rate",
}


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(help=f"The experiment: {', '.join(EXPERIMENTS)}.", show_default=False)
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small part of it, in seconds or minutes.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data sets: see dpkfc data.", show_default="$DPKFC_DATA"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for results.", show_default="results/NAME")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The first seed, for other random numbers.", show_default="as published"),
    ] = None,
    device: cli_train.Device = "cpu",
) -> None:
    """Run a published comparison again: print its tables, write them, its figures and a report.

    A run that was interrupted continues where it stopped. table1 to table7 and fig1 to fig11 are the paper's, falsify,
    probe-spectrum and non-stationary answer its reviewers.

    [bold]Examples[/bold]

    [cyan]dpkfc reproduce bsr-error --quick[/cyan]

    [cyan]dpkfc reproduce bsr-error --out results/bsr-error[/cyan]

    [cyan]dpkfc reproduce fig2 --data-dir DATA[/cyan]              spectra of the factors: minutes

    [cyan]dpkfc reproduce table1 --data-dir DATA[/cyan]            private optimizers on MNIST: many hours
    """
    if name not in EXPERIMENTS:
        raise PrivacyError(f"{name!r} is not an experiment: choose from {', '.join(EXPERIMENTS)}")
    from experiments.options import ReproduceOptions

    from dpkfc.app.reports.run_report import write_report
    from dpkfc.app.workflow.fit import check_device, check_seed
    from dpkfc.app.workflow.run_folder import check_folder
    from experiments import study

    check_device(device)
    check_seed(seed)
    out = out or Path("results") / name
    check_folder(out)
    module, console = import_module(f"experiments.{EXPERIMENTS[name]}"), Console()
    order = ReproduceOptions(out, console, quick, data_dir, seed, device)
    try:
        study.reproduce(module.STUDY, order) if hasattr(module, "STUDY") else module.run(order)
    except (OSError, ValueError) as error:
        raise PrivacyError(str(error)) from error
    except KeyboardInterrupt:
        console.print(
            f"stopped; what is done is in {order.out}. The same command goes on from here.",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    console.print(f"[bold]{write_report(order.out)}[/bold]", soft_wrap=True, highlight=False)
