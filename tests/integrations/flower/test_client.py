"""How the guarantee of a Flower client could break, and that it does not.

Messages go through `ClientApp`, as Flower's runtimes call it: a new client object per message.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from messages import context, fit_message, reason, train_message, weights_in
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpkfc
from dpkfc.integrations.flower import (
    REASON_KEPT,
    PrivateClient,
    UnusableWeights,
    only_private_replies,
)
from dpkfc.losses import cross_entropy

N, CLIP, CLASSES = 24, 0.5, 3
ROUNDS, LOCAL_STEPS = 3, 2
EPSILON, DELTA = 3.0, 1e-3


def records(count: int = N) -> TensorDataset:
    """The last record is unlike the others, and saturates the clip."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 6, generator=generator), torch.arange(N) % (CLASSES - 1)
    x[-1], y[-1] = -60.0, CLASSES - 1
    return TensorDataset(x[:count], y[:count])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def client_of(
    folder: Path, data: Any = None, model: nn.Module | None = None, **changed: Any
) -> PrivateClient:
    """A client as a round creates it: nothing but the folder connects it with earlier rounds."""
    model = network() if model is None else model
    settings: dict[str, Any] = {
        "loss": cross_entropy,
        "epsilon": EPSILON,
        "delta": DELTA,
        "rounds": ROUNDS,
        "local_steps": LOCAL_STEPS,
        "batch_size": 8,
        "records": N,
        "clip": CLIP,
    }
    ledger = changed.pop("ledger", None) or dpkfc.Ledger(folder / "ledger.db", "clinic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = records() if data is None else data
    return PrivateClient(model, optimizer, data, ledger=ledger, **{**settings, **changed})


def train(client: PrivateClient, weights: Any) -> None:
    for batch in client.round(weights):
        cross_entropy(client.model, batch).backward()
        client.optimizer.step()
        client.optimizer.zero_grad()


def message_with(
    state: dict[str, Tensor] | None = None, kind: str = "train", server_round: int = 1
) -> Message:
    return train_message(network().state_dict() if state is None else state, kind, server_round)


def app_of(
    make_client: Callable[[], PrivateClient],
    finish: Callable[[PrivateClient, Message], Message] = PrivateClient.reply,
    begun: Callable[[PrivateClient], None] = lambda client: None,
) -> ClientApp:
    app = ClientApp(mods=[only_private_replies])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        client = make_client()
        loop = client.round(message)
        begun(client)
        for batch in loop:
            cross_entropy(client.model, batch).backward()
            client.optimizer.step()
            client.optimizer.zero_grad()
        return finish(client, message)

    return app


def ask(app: ClientApp, message: Message | None = None) -> Message:
    return app(message_with() if message is None else message, context())


def charged(folder: Path) -> list[int]:
    return [run.charged for run in dpkfc.Ledger(folder / "ledger.db", "clinic").runs()]


@pytest.fixture
def guarded() -> Any:
    """As within a ClientApp with the mod, for tests that call a client directly."""
    from dpkfc.integrations import flower

    token = flower._PASSED.set(flower._Passed())
    yield
    flower._PASSED.reset(token)


# -- the budget of all rounds


def test_rounds_of_new_clients_are_one_run_whose_epsilon_is_that_of_all_steps(
    tmp_path: Path,
) -> None:
    app = app_of(lambda: client_of(tmp_path))
    for _ in range(ROUNDS):
        weights_in(ask(app))
    ledger = dpkfc.Ledger(tmp_path / "ledger.db", "clinic")
    (run,) = ledger.runs()
    assert run.charged == run.mechanism.steps == ROUNDS * LOCAL_STEPS
    alone = dpkfc.Plan.make(
        records=N,
        batch_size=8,
        clip=CLIP,
        delta=DELTA,
        epsilon=EPSILON,
        steps=ROUNDS * LOCAL_STEPS,
    )
    assert run.mechanism == alone.mechanism
    assert ledger.epsilon(DELTA) == alone.epsilon() <= EPSILON
    assert client_of(tmp_path).epsilon() == alone.epsilon()
    assert "seed" not in run.unchecked and "ledger" not in run.unchecked


@pytest.mark.parametrize("claimed", [[1, 2, 3, 4], [1, 1, 1, 1], [3, 2, 1, 0], [0, 0, 0, -7]])
def test_a_round_beyond_the_plan_is_refused_whatever_the_server_calls_it(
    claimed: list[int], tmp_path: Path
) -> None:
    app = app_of(lambda: client_of(tmp_path))
    *served, last = [ask(app, message_with(server_round=number)) for number in claimed]
    assert not any(reply.has_error() for reply in served)
    assert "planned 3 rounds of 2 steps" in reason(last) and "budget" in reason(last)
    assert charged(tmp_path) == [ROUNDS * LOCAL_STEPS]


@pytest.mark.parametrize(
    "changed", [{"rounds": 4}, {"epsilon": 8.0}, {"batch_size": 12}, {"local_steps": 3}]
)
def test_the_plan_cannot_be_changed_between_rounds(changed: dict[str, Any], tmp_path: Path) -> None:
    weights_in(ask(app_of(lambda: client_of(tmp_path))))
    assert reason(ask(app_of(lambda: client_of(tmp_path, **changed)))) == REASON_KEPT
    assert charged(tmp_path) == [LOCAL_STEPS]


def test_another_name_is_another_run_and_a_budget_holds_for_both(tmp_path: Path) -> None:
    def client(name: str) -> PrivateClient:
        ledger = dpkfc.Ledger(tmp_path / "ledger.db", "clinic", budget=(EPSILON, DELTA))
        return client_of(tmp_path, federation=name, ledger=ledger)

    weights_in(ask(app_of(lambda: client("first"))))
    assert reason(ask(app_of(lambda: client("second")))) == REASON_KEPT
    assert charged(tmp_path) == [LOCAL_STEPS], "nothing was opened under the other name"


def test_an_interrupted_round_stays_charged_and_its_noise_is_not_used_again(
    tmp_path: Path,
) -> None:
    def killed(client: PrivateClient) -> None:
        def stop() -> None:
            raise RuntimeError("killed")

        assert client._round is not None
        client._round.run.after_step(stop)

    keys = Keys()
    app = app_of(lambda: client_of(tmp_path), begun=lambda client: (keys(client), killed(client)))
    assert reason(ask(app)) == REASON_KEPT
    assert charged(tmp_path) == [1]
    whole = app_of(lambda: client_of(tmp_path), begun=keys)
    answers = [ask(whole) for _ in range(ROUNDS)]
    assert [reply.has_error() for reply in answers] == [False, False, True]
    assert charged(tmp_path) == [5]
    assert len(keys.seen) == len(set(keys.seen)) == 5


class Keys:
    """The noise keys of all steps, also over several rounds and clients."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def __call__(self, client: PrivateClient) -> None:
        assert client._round is not None
        stream = client._round.run._noise
        add = stream.add_

        def noted(sums: Any, key: bytes, scale: float, step: int) -> None:
            self.seen.append(key)
            add(sums, key, scale, step)

        stream.add_ = noted  # type: ignore[method-assign]


def one_round(folder: str, gate: Any, replies: Any) -> None:
    """In a process of its own: begin a round, wait for the other one, and train."""

    def both_began(client: PrivateClient) -> None:
        gate.wait(60)

    reply = ask(app_of(lambda: client_of(Path(folder)), begun=both_began))
    replies.put(reply.has_error())


def test_of_two_processes_in_the_same_round_one_is_refused(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    gate, replies = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=one_round, args=(str(tmp_path), gate, replies)) for _ in range(2)]
    for process in both:
        process.start()
    errors = sorted(replies.get(timeout=120) for _ in both)
    for process in both:
        process.join(60)
    assert errors == [False, True]
    assert charged(tmp_path) == [LOCAL_STEPS]


def test_clients_of_one_process_are_told_apart_by_their_ledgers(tmp_path: Path) -> None:
    """As in a simulation, where all of them may call their data set the same."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        app = app_of(lambda name=name: client_of(tmp_path / name))
        replies = [ask(app) for _ in range(ROUNDS + 1)]
        assert [reply.has_error() for reply in replies] == [False] * ROUNDS + [True]
        assert charged(tmp_path / name) == [ROUNDS * LOCAL_STEPS]


def test_if_two_processes_open_the_federation_both_charge_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one looked before the first one had written."""
    found = PrivateClient._run_in_ledger
    late = client_of(tmp_path)
    looks: list[Any] = []

    def look(self: PrivateClient) -> Any:
        run = found(self)
        if self is late and not looks:
            looks.append(run)
            weights_in(ask(app_of(lambda: client_of(tmp_path))))
        return run

    monkeypatch.setattr(PrivateClient, "_run_in_ledger", look)
    weights_in(ask(app_of(lambda: late)))
    assert looks == [None]
    assert charged(tmp_path) == [2 * LOCAL_STEPS, 0]


def test_a_kept_client_and_kept_model_serve_all_rounds(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    app = app_of(lambda: client)
    replies = [ask(app) for _ in range(ROUNDS + 1)]
    assert [reply.has_error() for reply in replies] == [False] * ROUNDS + [True]
    assert charged(tmp_path) == [ROUNDS * LOCAL_STEPS]


# -- noise


@pytest.mark.parametrize("seed", [None, 7])
def test_no_noise_key_is_used_twice_by_any_round_or_client(
    seed: int | None, tmp_path: Path
) -> None:
    keys = Keys()
    for name in ("north", "south"):
        ledger = dpkfc.Ledger(tmp_path / f"{name}.db", name)
        app = app_of(
            lambda ledger=ledger: client_of(tmp_path, ledger=ledger, seed=seed), begun=keys
        )
        for _ in range(ROUNDS):
            weights_in(ask(app))
    assert len(keys.seen) == len(set(keys.seen)) == 2 * ROUNDS * LOCAL_STEPS


@pytest.mark.parametrize("seed", [None, 7])
def test_a_federation_repeats_itself_with_a_seed_only(seed: int | None, tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        app = app_of(lambda name=name: client_of(tmp_path / name, seed=seed))
        weights.append([weights_in(ask(app))["0.weight"] for _ in range(2)])
    (first, second), again = weights
    assert not torch.equal(first, second), "every round draws noise of its own"
    same = [torch.equal(one, other) for one, other in zip((first, second), again, strict=True)]
    assert same == [seed is not None] * 2


# -- what a record can change


class Sums:
    """Takes the place of the noise and keeps the sums that it would have been added to."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, client: PrivateClient) -> None:
        assert client._round is not None
        self.batch_size = client._round.run.plan.batch_size
        client._round.run._noise = self  # type: ignore[assignment]

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self.steps.append(torch.cat([x.flatten().double() for x in sums]) * self.batch_size)


GEOMETRIES: dict[str, Callable[[], Any]] = {
    "DP-SGD": lambda: None,
    "DP-KFC": lambda: dpkfc.KFC(dpkfc.probes.Tabular(6, classes=CLASSES), probes=32),
}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_neighbouring_data_sets_differ_by_at_most_the_clip_at_any_weights_of_the_server(
    geometry: str, scale: float, tmp_path: Path
) -> None:
    """A malicious server scales the weights as it likes."""
    state = {name: scale * value for name, value in network().state_dict().items()}
    seen = []
    for count in (N, N - 1):
        sums = Sums()
        ledger = dpkfc.Ledger(tmp_path / f"{count}.db", f"clinic of {count}")
        app = app_of(
            lambda ledger=ledger, count=count: client_of(
                tmp_path,
                records(count),
                ledger=ledger,
                batch_size=N,
                geometry=GEOMETRIES[geometry](),
            ),
            begun=sums,
        )
        weights_in(ask(app, message_with(state)))
        seen.append(sums.steps[0])
    distance = float((seen[0] - seen[1]).norm()) / CLIP
    assert 0.9 < distance <= 1 + 1e-5, "the last record saturates the clip"


def test_a_clip_from_probes_follows_the_weights_of_each_round(tmp_path: Path) -> None:
    clips = []

    def keep(client: PrivateClient) -> None:
        assert client._round is not None
        plan = client._round.run.plan
        clips.append(plan.clip)
        assert plan.noise_scale == pytest.approx(plan.noise_multiplier * plan.clip, rel=1e-2)

    geometry = GEOMETRIES["DP-KFC"]
    app = app_of(lambda: client_of(tmp_path, clip="auto", geometry=geometry()), begun=keep)
    for scale in (1.0, 3.0):
        state = {name: scale * value for name, value in network().state_dict().items()}
        weights_in(ask(app, message_with(state)))
    assert clips[0] != clips[1]
    assert charged(tmp_path) == [2 * LOCAL_STEPS], "one run: the noise is relative to the clip"


def test_the_geometry_is_the_same_at_every_client_and_nothing_of_it_is_sent(
    tmp_path: Path,
) -> None:
    maps, replies = [], []
    for name, scale in (("north", 1.0), ("south", 100.0)):
        x, y = records().tensors
        ledger = dpkfc.Ledger(tmp_path / f"{name}.db", name)

        def client(ledger: dpkfc.Ledger = ledger, data: Any = (x * scale, 1 - y % 2)) -> Any:
            return client_of(
                tmp_path,
                TensorDataset(*data),
                ledger=ledger,
                local_steps=1,
                geometry=GEOMETRIES["DP-KFC"](),
            )

        def keep(client: PrivateClient, message: Message) -> Message:
            assert client._round is not None
            maps.append(client._round.run.geometry.state_dict())
            return client.reply(message)

        replies.append(ask(app_of(client, keep)))
    north, south = (list(tensors_in(state)) for state in maps)
    assert len(north) == len(south) > 0
    assert all(torch.equal(one, other) for one, other in zip(north, south, strict=True))
    for reply in replies:
        assert list(weights_in(reply)) == list(network().state_dict())
        assert set(reply.content) == {"arrays", "metrics"}


def tensors_in(state: Any) -> Any:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


# -- what leaves the client


def test_weights_are_those_of_plain_sgd_on_noisy_gradients_of_the_grid(tmp_path: Path) -> None:
    """So they are a function of the server's weights and of what was released."""
    released: list[list[Tensor]] = []
    grids = set()

    def watch(client: PrivateClient) -> None:
        assert client._round is not None
        grids.add(client._round.run.plan.grid)
        client.optimizer.register_step_post_hook(
            lambda *_: released.append([p.grad.clone() for p in client.model.parameters()])
        )

    reply = ask(app_of(lambda: client_of(tmp_path), begun=watch))
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (grid,) = grids
    assert len(released) == LOCAL_STEPS and grid > 0
    for grads in released:
        for p, grad in zip(plain.parameters(), grads, strict=True):
            assert torch.equal(grad / grid, (grad / grid).round())
            p.grad = grad
        optimizer.step()
    sent = weights_in(reply)
    assert all(torch.equal(value, sent[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("count", [N, N - 3])
def test_the_weight_of_a_client_is_the_public_number_of_records(count: int, tmp_path: Path) -> None:
    reply = ask(app_of(lambda: client_of(tmp_path, records(count))))
    assert dict(reply.content["metrics"]) == {"num-examples": N}


@pytest.mark.parametrize("missing", ["records", "rounds", "ledger"])
def test_public_numbers_and_the_ledger_are_required(missing: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"records": N, "rounds": 1, "ledger": 3, "local_steps": 1}
    with pytest.raises(
        (ValueError, TypeError), match="public number" if missing != "ledger" else "own disk"
    ):
        PrivateClient(
            network(),
            torch.optim.SGD(network().parameters()),
            records(),
            loss=cross_entropy,
            epsilon=1.0,
            delta=1e-3,
            batch_size=8,
            **{**settings, "ledger": dpkfc.Ledger(tmp_path / "x.db", "x"), missing: None},
        )


def with_metrics(**metrics: float) -> Callable[[PrivateClient, Message], Message]:
    def finish(client: PrivateClient, message: Message) -> Message:
        reply = client.reply(message)
        reply.content["metrics"].update(metrics)
        return reply

    return finish


def state_dict(client: PrivateClient, message: Message) -> Message:
    """What Flower's templates send, with one weight that is not the released one."""
    client.reply(message)
    with torch.no_grad():
        client.model[0].weight.add_(records().tensors[0].mean())
    arrays = ArrayRecord(client.model.state_dict())
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": N})})
    return Message(content, reply_to=message)


def true_count(client: PrivateClient, message: Message) -> Message:
    reply = client.reply(message)
    reply.content["metrics"] = MetricRecord({"num-examples": N - 3})
    return reply


def own_error(client: PrivateClient, message: Message) -> Message:
    return Message(Error(0, f"mean {records().tensors[0].mean()}"), reply_to=message)


@pytest.mark.parametrize(
    "finish",
    [with_metrics(train_loss=0.3), state_dict, true_count, own_error],
    ids=["metrics", "state_dict", "len(dataset)", "error"],
)
def test_nothing_leaves_that_was_not_released(finish: Any, tmp_path: Path) -> None:
    assert reason(ask(app_of(lambda: client_of(tmp_path), finish))) == REASON_KEPT


def test_public_metrics_leave(tmp_path: Path) -> None:
    def finish(client: PrivateClient, message: Message) -> Message:
        return client.reply(message, public_metrics={"rounds-left": client.rounds_left})

    reply = ask(app_of(lambda: client_of(tmp_path), finish))
    assert dict(reply.content["metrics"]) == {"num-examples": N, "rounds-left": ROUNDS - 1}


def test_an_evaluation_on_private_records_does_not_leave(tmp_path: Path) -> None:
    app = app_of(lambda: client_of(tmp_path))

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 0.91, "num-examples": N - 3})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    assert reason(ask(app, message_with(kind="evaluate"))) == REASON_KEPT


def test_the_text_of_an_exception_stays_with_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower sends ``str(exception)`` to the server, and texts quote records."""

    class Named(TensorDataset):
        def __getitem__(self, row: Any) -> Any:
            raise ValueError("cannot parse 'Ada Lovelace, HIV positive'")

    app = app_of(lambda: client_of(tmp_path, Named(*records().tensors)))
    with caplog.at_level(logging.ERROR):
        reply = ask(app)
    assert reason(reply) == REASON_KEPT
    assert "Ada Lovelace" in caplog.text, "the client's own log has it"


def test_a_client_without_the_mod_refuses_before_anything_is_charged(tmp_path: Path) -> None:
    with pytest.raises(dpkfc.PrivacyError, match=r"ClientApp\(mods=\[.*only_private_replies"):
        train(client_of(tmp_path), message_with())
    assert charged(tmp_path) == []


# -- the server's weights


def changed_state(name: str, value: Any) -> dict[str, Tensor]:
    state = network().state_dict()
    if value is None:
        del state[name]
    else:
        state[name] = value
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (changed_state("0.bias", torch.full((8,), float("nan"))), "'0.bias'.*not finite"),
        (changed_state("2.weight", torch.full((3, 8), float("inf"))), "'2.weight'.*not finite"),
        (
            changed_state("2.weight", torch.full((3, 8), 1e300, dtype=torch.float64)),
            "'2.weight'.*not finite",
        ),
        (changed_state("0.bias", None), "missing 0.bias"),
        (changed_state("head", torch.zeros(2)), "unknown head"),
        (changed_state("0.bias", torch.zeros(9)), r"shape \[9\].*\[8\]"),
    ],
    ids=["NaN", "inf", "overflow", "missing", "unknown", "shape"],
)
def test_weights_that_cannot_be_trained_are_refused_in_words_before_the_charge(
    state: dict[str, Tensor], words: str, tmp_path: Path, guarded: None
) -> None:
    reply = ask(app_of(lambda: client_of(tmp_path)), message_with(state))
    assert charged(tmp_path) == []
    with pytest.raises(UnusableWeights, match=words) as refused:
        train(client_of(tmp_path), message_with(state))
    assert reason(reply) == str(refused.value), "its text is public, so the server may read it"


class Counting(nn.Module):
    """Keeps a running mean of its inputs, as layers with statistics do; it does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("calls", torch.zeros(()))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return self.body(x)


def test_a_buffer_that_changes_does_not_leave(tmp_path: Path) -> None:
    def client(counts: bool) -> PrivateClient:
        model = Counting()
        model.counts = counts
        return client_of(tmp_path, model=model)

    message = message_with(Counting().state_dict())
    sent = weights_in(ask(app_of(lambda: client(False)), message))
    assert torch.equal(sent["constant"], torch.arange(3.0))
    assert torch.equal(sent["frozen"], torch.ones(2))
    assert not torch.equal(sent["body.0.weight"], network()[0].weight)
    assert reason(ask(app_of(lambda: client(True)), message)) == REASON_KEPT


def test_frozen_parts_are_sent_back_as_received_not_as_the_client_has_them(tmp_path: Path) -> None:
    def spoil(client: PrivateClient, message: Message) -> Message:
        client.model.frozen.data.add_(records().tensors[0].mean())
        return client.reply(message)

    app = app_of(lambda: client_of(tmp_path, model=Counting()), spoil)
    sent = weights_in(ask(app, message_with(Counting().state_dict())))
    assert torch.equal(sent["frozen"], torch.ones(2))


def test_batch_norm_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    app = app_of(lambda: client_of(tmp_path, model=model()))
    assert reason(ask(app, message_with(model().state_dict()))) == REASON_KEPT
    assert charged(tmp_path) == [0]


# -- misuse


def test_a_round_that_was_not_finished_is_not_sent(tmp_path: Path, guarded: None) -> None:
    client = client_of(tmp_path)
    with pytest.raises(dpkfc.PrivacyError, match=r"no round to reply to"):
        client.arrays()
    for batch in client.round(message_with()):
        cross_entropy(client.model, batch).backward()
        client.optimizer.step()
        break
    with pytest.raises(dpkfc.PrivacyError, match=r"1 of 2 steps.*would leak"):
        client.reply(message_with())


@pytest.mark.parametrize("sampling", ["min-separated", "cyclic-poisson"])
def test_sampling_that_needs_groups_is_refused(sampling: Any, tmp_path: Path) -> None:
    """Each round would draw the groups anew."""
    with pytest.raises(dpkfc.PrivacyError, match="more often than is accounted for"):
        client_of(tmp_path, options=dpkfc.Options(sampling=sampling))


def test_a_geometry_from_private_records_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="PRIVATE"):
        geometry = dpkfc.KFC(dpkfc.probes.Oracle(records().tensors[0]))
    with pytest.raises(dpkfc.PrivacyError, match="built from private records"):
        client_of(tmp_path, geometry=geometry)


def test_rounds_without_noise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dpkfc.PrivacyError, match="noise_multiplier=0.*not be private"):
        client_of(tmp_path, epsilon=None, noise_multiplier=0.0)


# -- NumPyClient


class Hospital(NumPyClient):
    def __init__(self, client: PrivateClient, metrics: dict[str, float]) -> None:
        self.client, self.metrics = client, metrics

    def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
        train(self.client, parameters)
        return self.client.arrays(), self.client.records, self.metrics


@pytest.mark.parametrize("metrics", [{}, {"train_loss": 0.3}], ids=["none", "loss"])
def test_a_numpy_client_sends_weights_and_the_public_number_of_records(
    metrics: dict[str, float], tmp_path: Path
) -> None:
    app = ClientApp(
        lambda context: Hospital(client_of(tmp_path), metrics).to_client(),
        mods=[only_private_replies],
    )
    replies = [app(fit_message(network()), context()) for _ in range(ROUNDS + 1)]
    if metrics:
        assert [reason(reply) for reply in replies[:-1]] == [REASON_KEPT] * ROUNDS
    else:
        for reply in replies[:-1]:
            (arrays,) = reply.content.array_records.values()
            assert [a.numpy().shape for a in arrays.values()] == [(8, 6), (8,), (3, 8), (3,)]
            assert reply.content["fitres.num_examples"]["num_examples"] == N
    assert "planned 3 rounds" in reason(replies[-1])
