"""`dpkfc plan`: compare kinds of noise for a run, before any data is read."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

OPTIMIZER = "Optimizer"


def plan(
    records: Annotated[int, typer.Argument(help="Records in the data set.", show_default=False)],
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 1.0,
    delta: Annotated[
        float, typer.Option(help="The probability with which epsilon may fail to hold.")
    ] = 1e-5,
    epochs: Annotated[float, typer.Option(help="Expected passes over the data.")] = 5.0,
    batch_size: Annotated[int, typer.Option(help="Expected number of records per step.")] = 256,
    clip: Annotated[float, typer.Option(help="The clip norm.")] = 1.0,
    max_buffers: Annotated[
        int, typer.Option(help="Copies of the model that the noise may keep in memory.")
    ] = 16,
    lr: Annotated[float, typer.Option(help="The learning rate.", rich_help_panel=OPTIMIZER)] = 0.1,
    momentum: Annotated[
        float, typer.Option(help="Momentum of torch.optim.SGD.", rich_help_panel=OPTIMIZER)
    ] = 0.9,
    nesterov: Annotated[
        bool, typer.Option("--nesterov", help="Nesterov momentum.", rich_help_panel=OPTIMIZER)
    ] = False,
    weight_decay: Annotated[
        float,
        typer.Option(
            help="Weight decay of torch.optim.SGD; it acts through its product with the learning "
            "rate.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = 0.0,
    decoupled: Annotated[
        bool,
        typer.Option(
            "--decoupled",
            help="Decoupled weight decay, as in AdamW.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = False,
) -> None:
    """Compare independent and correlated noise for a run of SGD, and state the privacy of the best.

    No private data is needed. In Python, noise="auto" makes the same choice.

    [bold]Examples[/bold]

    [cyan]dpkfc plan 60000 --epochs 5 --batch-size 256 --epsilon 1[/cyan]

    [cyan]dpkfc plan 60000 --epsilon 8 --momentum 0 --max-buffers 2[/cyan]
    """
    from rich.progress import track

    from dpkfc.app.reports.noise_table import noise_table
    from dpkfc.noise.workload import Workload
    from dpkfc.planning.choose_noise import best, compare, noise_candidates
    from dpkfc.planning.plan import batches

    console = Console()
    workload = Workload.sgd(momentum, weight_decay, lr=lr, coupled=not decoupled, nesterov=nesterov)
    size, steps = batches(records, batch_size, epochs, None)
    kinds = track(
        noise_candidates(max_buffers, records // size),
        "calibrating",
        console=console,
        transient=True,
    )
    candidates = compare(
        kinds,
        workload,
        records=records,
        batch_size=size,
        steps=steps,
        clip=clip,
        epsilon=epsilon,
        delta=delta,
    )
    chosen = best(candidates)
    console.print(noise_table(candidates, chosen, workload.name))
    console.print(chosen.plan)
