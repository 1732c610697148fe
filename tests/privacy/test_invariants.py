"""The invariants of DESIGN: each one is a way in which DP libraries have lost their guarantee."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import dpkfc
from dpkfc.sampling import poisson_sample

RECORDS = 40


def small_cnn(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)


def images(dtype: torch.dtype = torch.float32) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(RECORDS, 1, 4, 4).to(dtype), torch.randint(3, (RECORDS,)))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def start(
    model: nn.Module, data: Any, lr: float = 0.0, **settings: Any
) -> tuple[dpkfc.PrivateRun, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if lr else 0.0)
    defaults: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "steps": 4,
        "batch_size": 10,
        "clip": 0.5,
    }
    defaults |= {"seed": 3, "loss": loss_of}
    if "epsilon" in settings:
        del defaults["noise_multiplier"]
    return dpkfc.make_private(model, optimizer, data, **{**defaults, **settings}), optimizer


def run(
    private: dpkfc.PrivateRun, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, Tensor]]:
    """Train, and return the private gradients of every step."""
    steps = []
    for batch in private.loader:
        loss_of(model, batch).backward()
        optimizer.step()
        if private.took_step:
            steps.append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
        optimizer.zero_grad()
    return steps


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten().double() for g in grads.values()])


class TestScaleClipNoise:
    """2. Scale, then clip, then noise: alone, no sample exceeds C."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
    def test_no_sample_contributes_more_than_the_clip(
        self, dtype: torch.dtype, scale: float
    ) -> None:
        model, data = small_cnn(dtype), images(dtype)
        clip = 0.5
        for i in range(6):
            one = TensorDataset(data.tensors[0][i : i + 1] * scale, data.tensors[1][i : i + 1])
            private, optimizer = start(
                model, one, noise_multiplier=0.0, batch_size=1, steps=1, clip=clip, delta=0.5
            )
            # the sum before it is rounded to the dtype of the parameter
            sums: list[Tensor] = []
            private._noise = Recorder(sums)
            run(private, model, optimizer)
            private.detach()
            norm = torch.cat([s.flatten().double() for s in sums]).norm()
            assert norm <= clip, "the clipped contribution exceeds C"
            if scale > 1:
                assert norm > 0.99 * clip, (
                    "a large gradient should be clipped to C, not far below it"
                )

    def test_neighbouring_batches_differ_by_at_most_the_clip(self) -> None:
        """Sensitivity, measured: one record more moves the sum by at most C."""
        model, data = small_cnn(), images()
        sums = []
        for count in (RECORDS - 1, RECORDS):
            some = TensorDataset(data.tensors[0][:count], data.tensors[1][:count])
            private, optimizer = start(
                model, some, noise_multiplier=0.0, batch_size=count, steps=1, clip=0.05
            )
            (grads,) = run(private, model, optimizer)
            private.detach()
            sums.append(flat(grads) * count)
        assert (sums[1] - sums[0]).norm() <= 0.05 * (1 + 1e-5)


class Recorder:
    """Takes the place of the noise and keeps what it would have been added to."""

    def __init__(self, sums: list[Tensor]) -> None:
        self.sums = sums

    def add_(self, sums: list[Tensor], key: bytes, scale: float, step: int) -> None:
        self.sums[:] = [s.clone() for s in sums]


class TestEveryParameter:
    """3. Every trainable parameter is clipped and noised, or the step raises."""

    def test_a_parameter_that_the_loss_does_not_reach_still_gets_noise(self) -> None:
        model = small_cnn()
        model.unused = nn.Linear(3, 3)
        model.forward = lambda x: nn.Sequential.forward(
            nn.Sequential(*list(model.children())[:-1]), x
        )
        private, optimizer = start(model, images(), steps=1)
        (grads,) = run(private, model, optimizer)
        assert set(grads) == {name for name, _ in model.named_parameters()}
        assert all(g.norm() > 0 for g in grads.values())

    def test_a_weight_used_outside_its_module_is_refused_by_name(self) -> None:
        class Sneaky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)
                self.head = nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(F.linear(x.flatten(1)[:, :4], self.inner.weight))

        model = Sneaky()
        private, _ = start(
            model, images(), options=dpkfc.Options(check=False), loss="unchecked"
        )  # otherwise refused before
        with pytest.raises(dpkfc.PrivacyError, match=r"inner\.weight.*vmap_modules"):
            for batch in private.loader:
                loss_of(model, batch).backward()
        assert private.epsilon() == 0
        private.detach()
        private, optimizer = start(
            model,
            images(),
            options=dpkfc.Options(vmap_modules=[""]),
            clip=1e9,
            noise_multiplier=0.0,
            batch_size=RECORDS,
            steps=1,
        )
        (grads,) = run(private, model, optimizer)
        private.detach()
        model.zero_grad()
        loss_of(model, images().tensors).backward()
        torch.testing.assert_close(grads["inner.weight"], model.inner.weight.grad)

    def test_an_unfrozen_parameter_used_outside_its_module_is_refused_too(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Linear(3, 3))
        model[2].requires_grad_(False)
        start(model, images())
        model[2].requires_grad_(True)
        with pytest.raises(dpkfc.PrivacyError, match=r"2\.weight"):
            model[2].weight.sum().backward()

    def test_missing_and_foreign_parameters_are_refused(self) -> None:
        model = small_cnn()
        with pytest.raises(ValueError, match=r"missing from the optimizer: 0\.weight"):
            dpkfc.make_private(
                model,
                torch.optim.SGD(model[-1].parameters(), 0.1),
                images(),
                noise_multiplier=1.0,
                delta=1e-5,
                steps=1,
                batch_size=4,
                loss=loss_of,
            )
        foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], 0.1)
        with pytest.raises(dpkfc.PrivacyError, match="1 parameters that are not in the model"):
            dpkfc.make_private(
                model,
                foreign,
                images(),
                noise_multiplier=1.0,
                delta=1e-5,
                steps=1,
                batch_size=4,
                loss=loss_of,
            )

    def test_freezing_and_unfreezing_between_steps(self) -> None:
        model = small_cnn()
        private, optimizer = start(
            model, images(), steps=3, batch_size=RECORDS, clip=1e9, noise_multiplier=0.0
        )
        seen = []
        for step, batch in enumerate(private.loader):
            model[0].requires_grad_(step != 1)
            model[4].weight.requires_grad_(step != 2)
            loss_of(model, batch).backward()
            optimizer.step()
            seen.append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.zero_grad()
        private.detach()
        assert "0.weight" not in seen[1] and "4.weight" not in seen[2] and len(seen[0]) == 8
        model.requires_grad_(True)
        loss_of(model, images().tensors).backward()
        for grads in seen:
            for name, grad in grads.items():
                torch.testing.assert_close(
                    grad, dict(model.named_parameters())[name].grad, rtol=1e-4, atol=1e-6
                )

    def test_changing_an_input_in_place_is_refused(self) -> None:
        class InPlace(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 16)
                self.head = nn.Linear(16, 3)

            def forward(self, x: Tensor) -> Tensor:
                x = x.flatten(1) * 1.0
                y = self.layer(x)
                x += 1
                return self.head(y + x)

        model = InPlace()
        private, _ = start(model, images(), loss="unchecked")  # otherwise refused before
        with pytest.raises(dpkfc.PrivacyError, match="'layer' was changed in place"):
            for batch in private.loader:
                loss_of(model, batch).backward()


class TestNotFinite:
    """4. A sample that is not finite contributes exactly zero; the others are untouched."""

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    def test_poison_is_dropped_and_counted(self, poison: float) -> None:
        model, data = small_cnn(), images()
        settings = {"noise_multiplier": 0.0, "batch_size": RECORDS, "steps": 1}
        others = TensorDataset(data.tensors[0][1:], data.tensors[1][1:])
        private, optimizer = start(model, others, **{**settings, "batch_size": RECORDS - 1})
        (want,) = run(private, model, optimizer)
        private.detach()
        data.tensors[0][0, 0, 2, 2] = poison
        private, optimizer = start(model, data, **settings)
        (got,) = run(private, model, optimizer)
        private.detach()
        assert private.not_private.non_finite == 1
        for name in want:
            torch.testing.assert_close(
                got[name] * RECORDS, want[name] * (RECORDS - 1), rtol=1e-5, atol=1e-6
            )

    def test_poison_in_every_kind_of_layer(self) -> None:
        from test_layers import ALL, BATCH

        for case in ALL:
            torch.manual_seed(1)
            model, inputs = case.build(), case.inputs()
            if not inputs.is_floating_point():
                continue
            outcome = []
            for value in (math.nan, 0.0):
                inputs[2] = value
                weights = torch.ones(BATCH)
                weights[2] = 1.0 if math.isnan(value) else 0.0
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

                def weighted(model: nn.Module, batch: Any) -> Tensor:
                    return (model(batch[0]).flatten(1).cos().sum(1) * batch[1]).mean()

                private = dpkfc.make_private(
                    model,
                    optimizer,
                    TensorDataset(inputs, weights),
                    noise_multiplier=0.0,
                    delta=1e-5,
                    steps=1,
                    batch_size=BATCH,
                    clip=0.1,
                    loss=weighted,
                    options=dpkfc.Options(check=False),
                )
                for batch in private.loader:
                    weighted(model, batch).backward()
                    optimizer.step()
                private.detach()
                assert private.not_private.non_finite == (1 if math.isnan(value) else 0), case.name
                outcome.append([p.grad for p in model.parameters()])
            torch.testing.assert_close(outcome[0], outcome[1], rtol=1e-4, atol=1e-7, msg=case.name)


class TestEmptyBatches:
    """5. An empty batch takes its noise step; the sum is divided by the expected batch size."""

    def test_empty_batches_take_noise_steps(self) -> None:
        model, data = small_cnn(), images()
        few = TensorDataset(data.tensors[0][:3], data.tensors[1][:3])
        before = [p.detach().clone() for p in model.parameters()]
        private, optimizer = start(model, few, lr=0.1, steps=30, batch_size=1, delta=0.1)
        seen = sum(1 for _ in _training(private, model, optimizer))
        assert private.steps == 30 and seen < 30, "with a rate of 1/3, some of 30 batches are empty"
        assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))

    def test_a_step_without_records_is_pure_noise_of_the_right_size(self) -> None:
        for seed in range(50):  # until a seed draws no record: one in e does
            model = nn.Linear(100, 100)
            nn.init.zeros_(model.weight)
            data = TensorDataset(torch.zeros(10**5, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            settings = {
                "noise_multiplier": 2.0,
                "delta": 1e-7,
                "steps": 1,
                "batch_size": 1,
                "clip": 3.0,
            }
            # its records are not inputs of the model: the loop computes no loss
            private = dpkfc.make_private(
                model, optimizer, data, **settings, seed=seed, loss="unchecked"
            )
            if not list(private.loader):
                assert private.steps == 1
                assert abs(model.weight.std() / (2.0 * 3.0) - 1) < 0.05
                return
        raise AssertionError("no empty batch in 50 tries")

    def test_division_is_by_the_expected_batch_size(self) -> None:
        model = small_cnn()
        private, optimizer = start(
            model, images(), noise_multiplier=0.0, steps=20, batch_size=10, clip=1e-3
        )
        for batch in private.loader:
            loss_of(model, batch).backward()
            optimizer.step()
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            assert total <= 1e-3 * len(batch[0]) / 10 * (1 + 1e-4)
            optimizer.zero_grad()


def _training(private: dpkfc.PrivateRun, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for batch in private.loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield batch


class TestSampling:
    """6. What is sampled is what is accounted."""

    def test_each_record_is_drawn_independently_at_the_planned_rate(self) -> None:
        from dpkfc.random import first_key, next_key

        records, rate, steps = 200, 0.05, 4000
        key, counts, sizes, pairs = first_key(0), torch.zeros(records), [], 0
        for _ in range(steps):
            rows = poisson_sample(key, records, rate)
            counts[rows] += 1
            sizes.append(len(rows))
            pairs += 0 in rows and 1 in rows
            key = next_key(key)
        deviation = (counts - steps * rate) / math.sqrt(steps * rate * (1 - rate))
        assert deviation.abs().max() < 4.5, "a record is drawn too often or too rarely"
        variance = torch.tensor(sizes, dtype=torch.float64).var()
        assert abs(variance / (records * rate * (1 - rate)) - 1) < 0.1, (
            "batch sizes are not binomial"
        )
        assert abs(pairs - steps * rate**2) < 5 * math.sqrt(steps * rate**2), (
            "two records are not drawn independently"
        )

    @pytest.mark.parametrize(
        "build",
        [
            lambda data: DataLoader(
                data, batch_size=4, sampler=WeightedRandomSampler(torch.ones(RECORDS), 10)
            ),
            lambda data: DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
            lambda data: DataLoader(
                data, batch_size=4, sampler=torch.utils.data.RandomSampler(data, replacement=True)
            ),
            lambda data: iter(data),
        ],
    )
    def test_foreign_samplers_are_refused(self, build: Any) -> None:
        with pytest.raises((dpkfc.PrivacyError, TypeError), match="Poisson"):
            start(small_cnn(), build(images()))

    def test_a_loader_keeps_its_data_collate_function_and_batch_size(self) -> None:
        model, data = small_cnn(), images()
        seen = []

        def collate(records: list[Any]) -> Any:
            seen.append(len(records))
            return torch.utils.data.default_collate(records)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = dpkfc.make_private(
            model,
            optimizer,
            DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate),
            noise_multiplier=1.0,
            delta=1e-5,
            epochs=2,
            seed=1,
            loss=loss_of,
        )
        assert private.plan.batch_size == 8 and private.plan.steps == 10
        seen.clear()  # it was tried on a few records
        run(private, model, optimizer)
        assert len(seen) == 10 and len(set(seen)) > 1

    def test_batches_from_elsewhere_are_refused(self) -> None:
        model, data = small_cnn(), images()
        private, optimizer = start(model, data)
        loss_of(model, data.tensors).backward()
        with pytest.raises(dpkfc.PrivacyError, match=r"without a batch from run\.loader"):
            optimizer.step()
        assert private.epsilon() == 0

    def test_one_batch_cannot_be_used_twice_nor_in_part(self) -> None:
        model = small_cnn()
        private, optimizer = start(
            model, images(), batch_size=20, loss="unchecked"
        )  # the records are counted anyway
        with pytest.raises(dpkfc.PrivacyError, match="were seen by backward"):
            for batch in private.loader:
                loss_of(model, batch).backward()
                loss_of(model, batch).backward()
                optimizer.step()
        with pytest.raises(dpkfc.PrivacyError, match="were seen by backward"):
            for x, y in private.loader:
                loss_of(model, (x[1:], y[1:])).backward()
                optimizer.step()
        with pytest.raises(dpkfc.PrivacyError, match="not called for the last batch"):
            for _ in private.loader:
                pass
        assert private.epsilon() == 0 and private.steps == 0

    def test_two_halves_under_one_backward_are_not_clipped_as_pairs(self) -> None:
        model, data = small_cnn(), images()
        private, optimizer = start(
            model, data, batch_size=RECORDS, loss="unchecked"
        )  # the records are counted anyway
        with pytest.raises(dpkfc.PrivacyError, match="were seen by backward"):
            for x, y in private.loader:
                half = len(x) // 2
                (
                    loss_of(model, (x[:half], y[:half])) + loss_of(model, (x[half:], y[half:]))
                ).backward()
                optimizer.step()

    def test_steps_beyond_the_plan_are_refused(self) -> None:
        model = small_cnn()
        private, optimizer = start(model, images(), steps=2)
        run(private, model, optimizer)
        with pytest.warns(UserWarning, match="planned steps have been taken"):
            assert list(private.loader) == []
        with pytest.raises(dpkfc.PrivacyError, match="without a batch"):
            optimizer.step()


class TestNoise:
    """7. Noise is added once, to the sum, for any chunking and any resume."""

    @pytest.mark.parametrize("chunk", [None, 7, 1])
    def test_total_variance_does_not_depend_on_chunks(self, chunk: int | None) -> None:
        model = small_cnn()
        private, optimizer = start(
            model,
            images(),
            max_physical_batch_size=chunk,
            noise_multiplier=3.0,
            clip=1e-6,
            steps=40,
            batch_size=20,
        )
        noise = torch.cat([flat(grads) * 20 for grads in run(private, model, optimizer)])
        assert len(noise) > 20_000
        assert abs(noise.std() / 3e-6 - 1) < 0.02
        assert abs(noise.mean()) < 4 * 3e-6 / math.sqrt(len(noise))

    def test_chunks_give_the_same_private_gradients(self) -> None:
        results = []
        for chunk in (None, 7, 1):
            model = small_cnn()
            private, optimizer = start(
                model, images(), lr=0.1, max_physical_batch_size=chunk, batch_size=20
            )
            run(private, model, optimizer)
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)

    def test_accumulation_by_hand_gives_the_same(self) -> None:
        results = []
        for by_hand in (False, True):
            model = small_cnn()
            private, optimizer = start(model, images(), lr=0.1, batch_size=20)
            for x, y in private.loader:
                parts = zip(x.split(6), y.split(6), strict=True) if by_hand else [(x, y)]
                for part in parts:
                    loss_of(model, part).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

    def test_noise_is_fresh_every_step_and_every_run(self) -> None:
        steps = []
        for _ in range(2):
            model = small_cnn()
            private, optimizer = start(model, images(), clip=1e-6, seed=None)
            steps += [flat(g) for g in run(private, model, optimizer)]
        assert len({tuple(s.tolist()) for s in steps}) == 8
        correlation = torch.corrcoef(torch.stack(steps)) - torch.eye(8, dtype=torch.float64)
        assert correlation.abs().max() < 0.2

    def test_the_global_generator_is_neither_read_nor_moved(self) -> None:
        outcomes = []
        for disturb in (False, True):
            model, data = small_cnn(), images()
            torch.manual_seed(9)
            private, optimizer = start(model, data, lr=0.1)
            for batch in private.loader:
                if disturb:
                    torch.manual_seed(7)
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append(
                (torch.cat([p.detach().flatten() for p in model.parameters()]), torch.rand(1))
            )
        assert torch.equal(outcomes[0][0], outcomes[1][0]), (
            "the run depends on the global generator"
        )
        torch.manual_seed(9)
        assert torch.equal(outcomes[0][1], torch.rand(1))


class TestWhatIsNotPrivateSaysSo:
    """9. Losses, norms and oracle geometry are marked.

    A run with an oracle reports epsilon = inf.
    """

    def test_oracle_geometry_reports_infinity(self) -> None:
        class Oracle(dpkfc.Identity):
            name = "oracle"
            public = False

        model = small_cnn()
        private, optimizer = start(model, images(), geometry=Oracle())
        assert private.epsilon() == 0
        run(private, model, optimizer)
        assert private.epsilon() == math.inf
        assert "inf" in str(private.plan) and "private records" in str(private.plan)

    def test_no_noise_reports_infinity(self) -> None:
        model = small_cnn()
        private, optimizer = start(model, images(), noise_multiplier=0.0)
        run(private, model, optimizer)
        assert private.epsilon() == math.inf

    def test_exact_counts_are_kept_under_a_name_that_says_so(self) -> None:
        model = small_cnn()
        private, optimizer = start(model, images(), clip=1e-3)
        run(private, model, optimizer)
        counts = private.not_private
        assert counts.samples > 0 and counts.clipped == counts.samples and counts.non_finite == 0
        assert "not covered by epsilon" in type(counts).__doc__


class TestCopies:
    """A copy of the model is a plain model, so that averaging or saving it cannot touch the run."""

    @pytest.mark.parametrize(
        "copying",
        [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_is_plain_and_independent(self, copying: Any) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.PReLU(4), nn.Linear(4, 3))
        private, optimizer = start(model, images())
        twin = copying(model)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        x, y = images().tensors
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        assert loss != F.cross_entropy(model(x), y), "the copy must use its own weights"
        assert all(p.grad is not None for p in twin.parameters())
        assert not private._loop_grads._grads
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        run(private, model, optimizer)

    def test_detach_leaves_nothing_behind(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.PReLU(4), nn.Linear(4, 3))
        before = [
            (len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
            for m in model.modules()
        ]
        private, optimizer = start(model, images())
        run(private, model, optimizer)
        private.detach()
        assert before == [
            (len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
            for m in model.modules()
        ]
        loss_of(model, images().tensors).backward()
        optimizer.step()
        assert all(p.requires_grad and p.grad is not None for p in model.parameters())


class TestGeometryIsBlind:
    """1. The geometry is given the names of parameters, never the data.

    It cannot tell two data sets apart.
    """

    def test_the_geometry_sees_the_same_whatever_the_data(self) -> None:
        seen = []
        for seed in (1, 2):

            class Spy(dpkfc.Identity):
                log: ClassVar[list[Any]] = []

                def map_of(self, parameters: tuple[str, ...]) -> Any:
                    self.log.append(parameters)
                    return super().map_of(parameters)

            torch.manual_seed(seed)
            data = TensorDataset(torch.randn(RECORDS, 1, 4, 4) * seed, torch.randint(3, (RECORDS,)))
            model = small_cnn()
            private, optimizer = start(model, data, geometry=Spy())
            run(private, model, optimizer)
            seen.append(Spy.log)
        assert seen[0] == seen[1] and len(seen[0]) > 0
