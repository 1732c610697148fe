"""Federated learning with Flower: clients whose rounds share one privacy budget.

A Flower client is short-lived: every round creates it anew, often in a new process. So nothing that
a client keeps in memory can limit what it spends over all rounds. Here all rounds of a client are
*one* run in the client's ledger, planned for ``rounds * local_steps`` steps before the first round
and calibrated as a whole. A round continues that run by `local_steps` steps.

    round(message)    weights of the server -> model; a run that continues at the ledger's count
    the user's loop   plain PyTorch; every step is charged to the ledger before its result is seen
    reply(message)    trainable parameters, and the public number of records

`only_private_replies`, a Flower mod, is the only way out: a reply that holds anything else, and the
text of an exception, stay with the client.

**Guarantee.** Everything that a client sends in all rounds together is (ε, δ)-differentially
private under adding or removing one of its records, towards the server and everybody who sees the
messages. It holds per client, whatever weights the server sends: they may be chosen adaptively. A
person with records at several clients is protected by the composition of these clients' budgets.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkfc.accounting.ledger import Ledger, LedgerRun
from dpkfc.clipping import AutomaticClipping
from dpkfc.engine.loader import read_source
from dpkfc.engine.make_private import make_private
from dpkfc.engine.options import Options
from dpkfc.engine.run import PrivateRun
from dpkfc.errors import PrivacyError
from dpkfc.geometry.base import Geometry
from dpkfc.planning.plan import Plan, batches

if TYPE_CHECKING:
    from flwr.app import Context, Message

# How Flower's strategies, and its older NumPyClient, name the weight of a client in an average.
NUM_EXAMPLES = ("num-examples", "num_examples")
# What a NumPyClient adds to its reply.
STATUS = "fitres.status"
SUCCESS = (0, "Success")
REASON_KEPT = "the client failed or refused this message; the reason is in the client's own log"

Metric = int | float
Weights = Sequence[np.ndarray]

logger = logging.getLogger(__name__)


class RoundRefused(PrivacyError):
    """The client does not take part in a round. The text holds public facts only, and is sent."""


class UnusableWeights(ValueError):
    """The server's weights cannot be trained. The text holds public facts only, and is sent."""


class PrivateClient:
    """One client of a federation, with one privacy budget for all its rounds.

    Create it in the function that Flower calls in every round, or keep it over the rounds: the
    ledger counts, not this object.

    Args:
        model, optimizer: your own; neither is wrapped. The server's weights replace the model's.
        dataset: a map-style Dataset or a DataLoader, as for `make_private`.
        loss: ``loss(model, batch) -> scalar``, the loss that your loop computes.
        epsilon, delta: the budget of this client for all rounds together.
        noise_multiplier: σ, instead of epsilon.
        rounds: the number of rounds that this client may take part in; a public number.
        local_steps, local_epochs: steps, or expected passes over the data, per round; give one.
        batch_size: the expected batch size; by default that of your DataLoader.
        records: the number of records, stated as public. It is sent as the weight of this client
            in the average. ``len(dataset)`` is never sent.
        ledger: a `Ledger` on the client's own disk. Its data set name must be this client's own.
        clip, geometry, max_physical_batch_size: as for `make_private`. The geometry is built in
            every round at the server's weights, from probes: nothing of it is communicated.
        federation: names the rounds in the ledger. Rounds under another name are another run,
            which is composed with this one.
        seed: for experiments only. Every round, and every data set name, gets other noise from it.
        options: as for `make_private`.

    Attributes:
        plan: what is sampled, clipped, noised and accounted, over all rounds.
        records: the public number of records, the `num_examples` of a NumPyClient.

    Raises:
        PrivacyError, ValueError, TypeError: as for `make_private`.

    **Guarantee.** Under a plan of T = rounds · local_steps steps, the ledger admits T charged steps
    of the mechanism ``plan.mechanism``, however many clients, processes or rounds take them, and
    whatever round numbers the server claims. All rounds compose to exactly that mechanism: noise
    and samples of every round have keys of their own. The server's weights are public, and each
    step clips every record's gradient at whatever weights it is computed.

    >>> import dpkfc, tempfile, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> client = PrivateClient(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     torch.utils.data.TensorDataset(torch.randn(98, 4), torch.randint(2, (98,))),
    ...     loss=dpkfc.losses.cross_entropy,
    ...     epsilon=2.0, delta=1e-3, rounds=10, local_steps=5, batch_size=10, records=100,
    ...     ledger=dpkfc.Ledger(tempfile.mkdtemp() + "/privacy.db", "clinic 7"),
    ... )
    >>> client.plan.steps, client.rounds_left, client.epsilon()
    (50, 10, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | Literal["unchecked"],
        rounds: int,
        records: int,
        ledger: Ledger,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        local_steps: int | None = None,
        local_epochs: float | None = None,
        batch_size: int | None = None,
        clip: float | AutomaticClipping | Literal["auto"] = 1.0,
        geometry: Geometry | None = None,
        federation: str = "flower",
        max_physical_batch_size: int | None = None,
        seed: int | None = None,
        options: Options | None = None,
    ) -> None:
        options = Options() if options is None else options
        _check_arguments(rounds, records, ledger, geometry, options)
        batch_size = read_source(dataset).batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("batch_size is missing: the records a step is expected to draw")
        batch_size, self.local_steps = batches(records, batch_size, local_epochs, local_steps)
        self.model, self.optimizer = model, optimizer
        self.records, self.ledger, self.federation = int(records), ledger, federation
        self._seed = seed
        planned: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "steps": int(rounds) * self.local_steps,
            "batch_size": batch_size,
            "records": self.records,
        }
        self.plan = Plan.make(
            **planned, clip=1.0 if clip == "auto" else clip, accountant=options.accountant
        )
        if self.plan.noise_multiplier == 0:
            raise PrivacyError(
                "noise_multiplier=0: what the client sends would not be private. Give epsilon, or "
                "a noise multiplier above 0"
            )
        self._dataset = dataset
        self._settings: dict[str, Any] = {
            **planned,
            "loss": loss,
            "clip": clip,
            "geometry": geometry,
            "max_physical_batch_size": max_physical_batch_size,
            "ledger": ledger,
            "options": options,
        }
        self._round: _Round | None = None

    @property
    def charged(self) -> int:
        """Steps of all rounds that count against the budget, by the ledger."""
        run = self._run_in_ledger()
        return 0 if run is None else run.charged

    @property
    def rounds_left(self) -> int:
        """Whole rounds that the plan still holds."""
        return (self.plan.steps - self.charged) // self.local_steps

    def epsilon(self) -> float:
        """The privacy loss of all rounds so far. Does not consume budget."""
        return self.plan.epsilon(self.charged)

    def round(self, weights: Message | Weights) -> Iterator[Any]:
        """Take over the server's weights; iterate over the result instead of your DataLoader.

        Args:
            weights: the message of the server, or a NumPyClient's list of arrays, in the order of
                ``model.state_dict()``.

        Raises:
            RoundRefused: the plan holds no further round, or another process takes its steps.
            UnusableWeights: the weights do not fit the model, or are not finite. Nothing is
                charged.
        """
        _exit()
        received = _received_weights(self.model, weights)
        run_id, charged = self._open_in_ledger()
        if charged + self.local_steps > self.plan.steps:
            raise RoundRefused(
                f"this client planned {self.plan.steps // self.local_steps} rounds of "
                f"{self.local_steps} steps for federation {self.federation!r}, and has no steps "
                "left for another one: the budget of its records is spent"
            )
        self._leave_round()
        self.model.load_state_dict(received)
        run = make_private(
            self.model,
            self.optimizer,
            self._dataset,
            **self._settings,
            seed=self._seed_of_round(charged),
        )
        # Continues the federation's run in the ledger, with keys that no other round has.
        run.load_state_dict({**run.state_dict(), "run": run_id, "lost_steps": charged})
        self._round = _Round(run, received, _buffers(self.model))
        if run.charged != charged:
            raise RoundRefused(
                f"step {charged} of federation {self.federation!r} was the last one when this "
                f"round began, and now it is step {run.charged}: another process takes part for "
                "the same client"
            )
        return run.loader.take(self.local_steps)

    def reply(
        self,
        message: Message,
        public_metrics: Mapping[str, Metric] | None = None,
        weighted_by: str = NUM_EXAMPLES[0],
    ) -> Message:
        """The answer to the server: new weights, and the public number of records.

        Args:
            message: the message of the server.
            public_metrics: numbers that you state to be public. A loss or an accuracy on private
                records is not: epsilon does not cover it.
            weighted_by: the name under which the strategy looks for the weight of a client.

        Raises:
            PrivacyError: the round was not finished, or a buffer of the model has changed.
        """
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

        (name,) = message.content.array_records
        arrays = self.arrays(public_metrics)
        record = ArrayRecord(
            {key: Array(x) for key, x in zip(self.model.state_dict(), arrays, strict=True)}
        )
        metrics = MetricRecord({**(public_metrics or {}), weighted_by: self.records})
        _exit().weight_names.add(weighted_by)
        content = RecordDict({name: record, "metrics": metrics})
        return Message(content, reply_to=message)

    def arrays(self, public_metrics: Mapping[str, Metric] | None = None) -> list[np.ndarray]:
        """The new weights in the order of ``model.state_dict()``, for a NumPyClient.

        Return them from `fit` with `records` and the metrics that are stated as public here.

        **Guarantee.** Trainable parameters are a function of the server's weights and of noisy
        gradients on a grid. Frozen parameters and buffers are sent as they were received.
        """
        passed = _exit()
        if self._round is None:
            raise PrivacyError(
                "there is no round to reply to: iterate over client.round(message) first"
            )
        if self._round.sent is None:
            self._round.sent = _weights_to_send(self.model, self._round, self.local_steps)
            self._leave_round()
        sent = self._round.sent
        passed.arrays |= {_digest(array) for array in sent}
        passed.records = self.records
        passed.metrics.update(public_metrics or {})
        return sent

    def _run_in_ledger(self) -> LedgerRun | None:
        """The federation's run: the first one of its name, whoever opened it.

        A name in the ledger ends in a random number, because runs of different clients, in ledgers
        of their own, must be told apart in one process.
        """
        runs = self.ledger.runs()
        return next((run for run in runs if run.run_id.rpartition("#")[0] == self.federation), None)

    def _open_in_ledger(self) -> tuple[str, int]:
        """The name of the federation's run, and its charged steps."""
        mechanism, delta = self.plan.mechanism, self.plan.delta
        if self._run_in_ledger() is None:
            own = f"{self.federation}#{secrets.token_hex(4)}"
            self.ledger.open_run(own, mechanism, delta=delta)
            first = self._run_in_ledger()
            if first is not None and first.run_id != own:  # another process was faster
                self.ledger.close_run(own)
        run = self._run_in_ledger()
        assert run is not None
        return run.run_id, self.ledger.open_run(run.run_id, mechanism, delta=delta)

    def _leave_round(self) -> None:
        """Remove the hooks of the last round; its run stays open in the ledger."""
        if self._round is not None and not self._round.run.detached:
            self._round.run.detach(resumable=True)

    def _seed_of_round(self, charged: int) -> int | None:
        if self._seed is None:
            return None
        text = repr((self._seed, self.ledger.dataset, self.federation, charged))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass
class _Round:
    """The round under way, or the last one."""

    run: PrivateRun
    received: dict[str, Tensor]
    buffers: dict[str, Tensor]
    sent: list[np.ndarray] | None = None


def _check_arguments(
    rounds: Any, records: Any, ledger: Any, geometry: Geometry | None, options: Options
) -> None:
    for name, number in (("rounds", rounds), ("records", records)):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"{name}={number!r}: give a public number, a whole one of at least 1. The server "
                "sees it, so it must not be counted from the private records"
            )
    if not isinstance(ledger, Ledger):
        raise TypeError(
            "ledger must be a dpkfc.Ledger(path, dataset=...) on the client's own disk, not "
            f"{type(ledger).__name__}: Flower creates a client anew in every round, and only a "
            "ledger knows what the earlier rounds have spent"
        )
    if options.sampling not in (None, "poisson"):
        raise PrivacyError(
            f"options.sampling={options.sampling!r}: a round draws the groups of the records anew, "
            "so a record could take part more often than is accounted for. Leave it out: rounds "
            "use Poisson sampling and independent noise"
        )
    if options.best_of is not None:
        raise ValueError("options.best_of: a federation cannot be one try of tune_privately")
    if geometry is not None and not geometry.public:
        raise PrivacyError(
            f"{geometry.name} is built from private records: what is sent would not be private. "
            "Build it from probes: dpkfc.KFC(dpkfc.probes.PinkNoise(...))"
        )


# -- weights


def _received_weights(model: nn.Module, weights: Message | Weights) -> dict[str, Tensor]:
    """The server's weights by their names in the model, checked before anything is charged."""
    own = model.state_dict()
    given = _arrays_by_name(weights, list(own))
    unknown, missing = set(given) - set(own), set(own) - set(given)
    if unknown or missing:
        raise UnusableWeights(
            "the server's weights belong to another model: "
            + "; ".join(
                f"{what} {', '.join(sorted(names)[:8])}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
    received = {}
    for name, tensor in own.items():
        array = given[name]
        if tuple(array.shape) != tuple(tensor.shape):
            raise UnusableWeights(
                f"'{name}' has shape {list(array.shape)} in the server's weights and "
                f"{list(tensor.shape)} in the client's model"
            )
        value = torch.from_numpy(np.array(array))
        if not torch.isfinite(value.to(tensor.dtype)).all():
            raise UnusableWeights(
                f"'{name}' of the server's weights is not finite: training has diverged. Nothing "
                "was charged; start again from earlier weights, with a smaller learning rate"
            )
        received[name] = value
    return received


def _arrays_by_name(weights: Message | Weights, names: list[str]) -> dict[str, np.ndarray]:
    if not hasattr(weights, "content"):
        if len(weights) != len(names):
            raise UnusableWeights(
                f"the server sent {len(weights)} arrays, the client's model has {len(names)}"
            )
        return dict(zip(names, weights, strict=True))
    records = weights.content.array_records
    if len(records) != 1:
        raise UnusableWeights(
            f"the message holds {len(records)} ArrayRecords; a round needs one, with the weights"
        )
    (record,) = records.values()
    return {name: array.numpy() for name, array in record.items()}


def _weights_to_send(model: nn.Module, current: _Round, local_steps: int) -> list[np.ndarray]:
    if current.run.steps != local_steps:
        raise PrivacyError(
            f"{current.run.steps} of {local_steps} steps of this round were taken. To stop early "
            "because of what is in the batches would leak: finish the loop over client.round()"
        )
    for name, buffer in _buffers(model).items():
        before = current.buffers.get(name)
        if before is None or not torch.equal(before, buffer):
            raise PrivacyError(
                f"buffer '{name}' has changed in this round: it may depend on private records, and "
                "no noise covers it. Use layers without running statistics: dpkfc.fix(model)"
            )
    trainable = {
        name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    return [
        (value.detach().cpu() if name in trainable else current.received[name])
        .to(current.received[name].dtype)
        .numpy()
        .copy()
        for name, value in model.state_dict().items()
    ]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


# -- what leaves the client


@dataclass
class _Passed:
    """What clients have released while one message is handled."""

    arrays: set[str] = field(default_factory=set)  # digests
    records: int | None = None
    weight_names: set[str] = field(default_factory=lambda: set(NUM_EXAMPLES))
    metrics: dict[str, Metric] = field(default_factory=dict)


_PASSED: ContextVar[_Passed | None] = ContextVar("dpkfc_flower_passed", default=None)


def only_private_replies(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A Flower mod: no reply leaves the client but what a `PrivateClient` has released.

    ``ClientApp(mods=[only_private_replies])`` guards all functions of the app, and
    ``@app.train(mods=[only_private_replies])`` the training alone. List it after mods that encrypt
    or mask replies.

    **Guarantee.** Every array of a reply was returned by `PrivateClient.arrays` or put into a reply
    by `PrivateClient.reply`; every number is the public number of records or was stated as public.
    Flower sends the text of an exception to the server, and texts may quote records. Here the
    server learns that there was an exception; its text is logged at the client, unless it is a
    `RoundRefused` or an `UnusableWeights`, whose texts hold public facts only.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    passed = _Passed()
    token = _PASSED.set(passed)
    try:
        reply = call_next(message, context)
        _check_reply(reply, passed)
        return reply
    except Exception as error:
        logger.exception("the client does not reply to a message of the server")
        public = isinstance(error, RoundRefused | UnusableWeights)
        reason = str(error) if public else REASON_KEPT
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    finally:
        _PASSED.reset(token)


def _exit() -> _Passed:
    passed = _PASSED.get()
    if passed is None:
        raise PrivacyError(
            "Flower would send the text of an exception, which may quote records, and whatever "
            "else is in a reply. Let only private results leave the client: "
            "ClientApp(mods=[dpkfc.integrations.flower.only_private_replies])"
        )
    return passed


def _check_reply(reply: Message, passed: _Passed) -> None:
    """Refuse a reply with anything that no `PrivateClient` has released."""
    if reply.has_error():
        raise PrivacyError(f"the app replied with an error of its own: {reply.error.reason}")
    for record in reply.content.array_records.values():
        for name, array in record.items():
            if _digest(array.numpy()) not in passed.arrays:
                raise PrivacyError(
                    f"array '{name}' of the reply was not released by a PrivateClient: send "
                    "client.reply(message), or client.arrays() from a NumPyClient"
                )
    numbers = [*reply.content.metric_records.items(), *reply.content.config_records.items()]
    for place, metrics in numbers:
        for name, value in metrics.items():
            is_count = name in passed.weight_names and value == passed.records
            is_stated = name in passed.metrics and value == passed.metrics[name]
            is_status = place == STATUS and value in SUCCESS
            if not (is_count or is_stated or is_status):
                raise PrivacyError(
                    f"'{name}' of the reply is neither the public number of records nor stated as "
                    "public: epsilon does not cover it. Leave it out, or evaluate on public data "
                    "at the server; if it is public, give it as public_metrics="
                )


def _digest(array: np.ndarray) -> str:
    header = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()
