"""Reproduce a table or figure: `python -m experiments NAME`, from a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from experiments.common.arguments import EXPECTED_ERRORS, suggestion


@dataclass(frozen=True)
class Entry:
    """The folder that holds an experiment, and one line about it."""

    folder: str
    about: str


EXPERIMENTS = {
    "table1": Entry("table1", "private optimizers on MNIST at epsilon 1, 2, 5 and 8"),
    "table2": Entry("table2", "geometry from noise and from the wrong public data"),
    "table5": Entry("table5", "accuracy against epsilon on four tasks"),
    "table6": Entry("table1", "the same as table1"),
    "table7": Entry("table7", "importance of hyperparameters, by a search with Optuna"),
    "fig1": Entry("fig1", "signal-to-noise ratio of a private step, layer by layer"),
    "fig2": Entry("fig2", "eigenvalues of A ⊗ G from private, public and synthetic inputs"),
    "fig3": Entry("fig3", "public and synthetic factors compared with the oracle's"),
    "fig4": Entry("table5", "the same as table5"),
    "fig5": Entry("table5", "the same as table5"),
    "fig6": Entry("fig2", "the same as fig2"),
    "fig7": Entry("fig7", "eigenvalues of the Hessian on private, public and synthetic inputs"),
    "fig8": Entry("fig3", "the same as fig3"),
    "fig9": Entry("fig3", "the same as fig3"),
    "fig10": Entry("table7", "the same as table7"),
    "fig11": Entry("table7", "the same as table7"),
    "falsify": Entry("falsify", "is geometry from noise as good as from the private records?"),
    "probe-spectrum": Entry("probe_spectrum", "what probes must look like"),
    "non-stationary": Entry("non_stationary", "images that pink noise does not describe"),
    "demo": Entry("demo", "the demo over five seeds"),
    "geometry": Entry("geometry", "DP-SGD and DP-KFC on MNIST and FashionMNIST"),
    "correlated": Entry("correlated", "independent and correlated noise on FashionMNIST"),
    "federated": Entry("federated", "DP-SGD and DP-KFC clients, simulated by Flower"),
    "bsr-error": Entry("bsr_error", "the error of correlated noise: tables and a figure"),
    "rescaling": Entry("rescaling", "correlated noise through optimizers that rescale it"),
    "lora-sst2": Entry("lora_sst2", "LoRA on SST-2 inside Hugging Face's Trainer"),
    "preset": Entry("preset", "accuracy of the preset, without private tuning"),
    "noise-length": Entry("noise_length", "best learning rates and best noise lengths"),
    "clip-and-rate": Entry("clip_and_rate", "clip and learning rate on small digits"),
}
NAMES = "\n".join(f"[cyan]{name:15}[/cyan] {entry.about}" for name, entry in EXPERIMENTS.items())
HELP = f"""Run a published comparison again: print its tables, write them, its figures and a report.

An interrupted run continues where it stopped.
table1 to table7 and fig1 to fig11 are the paper's.
falsify, probe-spectrum and non-stationary answer its reviewers.

[bold]Experiments[/bold]

{NAMES}

[bold]Examples[/bold]

[cyan]dpkfc reproduce bsr-error --quick[/cyan]

[cyan]dpkfc reproduce bsr-error --out results/bsr-error[/cyan]

[cyan]dpkfc reproduce fig2 --data-dir DATA[/cyan]     eigenvalues of the factors: minutes

[cyan]dpkfc reproduce table1 --data-dir DATA[/cyan]   private optimizers on MNIST: many hours
"""

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(help=HELP, no_args_is_help=True)
def main(
    name: Annotated[str, typer.Argument(help="The experiment.", show_default=False)],
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small part, in seconds or minutes.")
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
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    out = out or Path("results") / name
    console = Console()
    try:
        run_experiment(name, out, console, quick, data_dir, seed, device)
    except KeyboardInterrupt:
        console.print(
            f"stopped; what is done is in {out}. The same command continues from there.",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    except BrokenPipeError:  # as in `... | head`, which typer handles
        raise
    except EXPECTED_ERRORS as error:
        Console(stderr=True).print(Text(f"dpkfc: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2) from None


def run_experiment(
    name: str,
    out: Path,
    console: Console,
    quick: bool,
    data_dir: Path | None,
    seed: int | None,
    device: str,
) -> None:
    """Run an experiment by its name and write its report."""
    if name not in EXPERIMENTS:
        raise ValueError(
            f"{name!r} is not an experiment: choose from {', '.join(EXPERIMENTS)}"
            + suggestion(name, EXPERIMENTS)
        )
    # Imported here, so that --help answers without loading torch.
    from dpkfc.app.reports.run_report import write_report
    from dpkfc.app.workflow.run_folder import check_folder
    from dpkfc.app.workflow.settings import check_device, check_seed
    from experiments.common.options import ReproduceOptions

    check_device(device)
    check_seed(seed)
    check_folder(out)
    experiment = import_module(f"experiments.{EXPERIMENTS[name].folder}.experiment")
    experiment.reproduce(ReproduceOptions(out, console, quick, data_dir, seed, device))
    console.print(f"[bold]{write_report(out)}[/bold]", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    app()
