"""What private training of large models costs, counted: memory, bytes, noise, refresh, arithmetic.

    python -m benchmarks.scaling_model
    python -m benchmarks.scaling_model --sequences 8 --tokens 2048 --bands 16

Prints the tables of docs/scaling.md. Nothing is timed: the figures follow from the shapes of the
layers by the formulas below. `python -m benchmarks.distributed` measures the bytes that ranks send,
`python -m benchmarks.device` counts the operations of the noise.

Symbols: P parameters, n devices, B sequences per device, S tokens per sequence, linear layers with
p outputs and q inputs, rank r of the maps, b bands of correlated noise. Weights, sums and the two
moments of Adam are float32 (4 bytes), activations bfloat16 (2 bytes). Divided by n means: by
FSDP2. One process and DDP hold and compute the whole.

Memory of one device:

* weights 4P, sums (they become `.grad`) 4P, Adam 8P, all divided by n: as in ordinary training;
* FSDP2 gathers one block of the model at a time, as in ordinary training;
* captured inputs and output gradients: 2BS(Σ q + Σ p). Ordinary training holds the inputs too, and
  frees the output gradients layer by layer. So the extra is 2BS Σ p;
* correlated noise: 4P(b-1), divided by n;
* maps: 2 · 4 · r · Σ q, on every device: the eigenvectors, and a scaled copy in the layout of the
  products. Layers with q > 8192 (`KFC(max_factor=...)`) and embeddings have one number instead.

Bytes that one device sends per step, in a ring:

* DDP: one all-reduce of the sums, 2 (n-1)/n · 4P, as in ordinary training;
* FSDP2: two all-gathers of the weights and one reduce-scatter of the sums, 3 (n-1)/n · 4P, as in
  ordinary training;
* control: one all-reduce of five 64-bit integers, 2 (n-1)/n · 40;
* refresh, every 50 steps: each layer's moment to its owner, 4q² (4qN for N < q probe tokens), and
  its root and spectrum from the owner, (4 + 8) q r + 4r. With FSDP2, a pass over probes gathers the
  weights twice, 2 (n-1)/n · 4P; a refresh has 4 passes, which all devices run at the same time if
  n ≥ 4.

Noise of one step: 186 integer operations per normal. With DDP every device computes P normals, so
that no noise is sent; with FSDP2, P/n.

Arithmetic of one step on one device, in floating-point operations:

* ordinary: 6 · BS · Σ pq (forward, gradients of inputs, gradients of weights), without attention,
  which costs the same in private training;
* norms: Σ 2B · min(S²(p + q), S p q): Gram matrices, or the gradient of one sequence at a time;
* maps of DP-KFC at each step: Σ 4BS q r for the inputs, and 4 p q r for the sum;
* refresh: 8 sequences of probes, 6 · 8S Σ pq and 2 · 8S Σ q² for the moments, and 10 q² (r + 16)
  per layer for the eigenvectors, divided by min(n, 4) for the passes and by n for the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FLOAT, HALF, DOUBLE = 4, 2, 8
INTEGER_OPERATIONS = 186  # per normal: python -m benchmarks.device
# A100: 312 Tflop/s in bfloat16, 19.5 T/s of 32-bit integer operations (NVIDIA's data sheet)
INTEGER_SLOWDOWN = 16
MAX_FACTOR = 8192  # of KFC
EVERY = 50  # steps between refreshes
PROBES = 8  # sequences per refresh: the default of probes.Tokens from 256 tokens on
PASSES = 4  # of a refresh
OVERSAMPLE = 16  # of the subspace iteration, which multiplies by the factor five times
CONTROL = 5 * 8  # bytes of the agreement on a step
DEVICES = (8, 64)


@dataclass(frozen=True)
class Linear:
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Transformer:
    """A decoder with gated feed-forward layers and without biases."""

    name: str
    vocabulary: int
    width: int
    hidden: int
    keys: int  # width of keys and of values
    blocks: int

    def linears(self) -> list[Linear]:
        d, f, kv = self.width, self.hidden, self.keys
        attention = [Linear(d, d), Linear(kv, d), Linear(kv, d), Linear(d, d)]
        block = [*attention, Linear(f, d), Linear(f, d), Linear(d, f)]
        return block * self.blocks + [Linear(self.vocabulary, d)]

    def inputs(self) -> int:
        """Σ of the widths of what enters linear layers; layers that read one tensor share it."""
        return self.blocks * (3 * self.width + self.hidden) + self.width

    def parameters(self) -> int:
        norms = (2 * self.blocks + 1) * self.width
        return sum(x.outputs * x.inputs for x in self.linears()) + (
            self.vocabulary * self.width + norms
        )


# the shapes of TinyLlama 1.1B and Llama 2 7B
MODELS = (
    Transformer("1 B", 32000, 2048, 5632, 256, 22),
    Transformer("7 B", 32000, 4096, 11008, 4096, 32),
)


@dataclass(frozen=True)
class Setting:
    sequences: int = 4  # per device
    tokens: int = 1024  # per sequence
    rank: int = 32
    bands: int = 16


@dataclass(frozen=True)
class Cost:
    """The terms for one model on n devices, `sharded` (FSDP2) or not (one process, DDP)."""

    model: Transformer
    n: int
    sharded: bool
    setting: Setting = Setting()

    @property
    def share(self) -> float:
        return 1 / self.n if self.sharded else 1.0

    @property
    def ring(self) -> float:
        return (self.n - 1) / self.n

    def mapped(self) -> list[Linear]:
        return [x for x in self.model.linears() if x.inputs <= MAX_FACTOR]

    # -- memory, in bytes

    def state(self) -> float:
        """Weights, sums, Adam."""
        return self.share * 4 * FLOAT * self.model.parameters()

    def captured_extra(self) -> float:
        rows = self.setting.sequences * self.setting.tokens
        return HALF * rows * sum(x.outputs for x in self.model.linears())

    def captured_inputs(self) -> float:
        return HALF * self.setting.sequences * self.setting.tokens * self.model.inputs()

    def correlated(self) -> float:
        return self.share * FLOAT * self.model.parameters() * (self.setting.bands - 1)

    def maps(self) -> float:
        return 2 * FLOAT * self.setting.rank * sum(x.inputs for x in self.mapped())

    # -- bytes per step

    def sent(self) -> float:
        collectives = 3 if self.sharded else 2
        return collectives * self.ring * FLOAT * self.model.parameters()

    def control(self) -> float:
        return 2 * self.ring * CONTROL

    def refresh_bytes(self) -> float:
        """Of one refresh, per device."""
        if self.n == 1:
            return 0.0
        r, probes = self.setting.rank, PROBES * self.setting.tokens
        moments = sum(FLOAT * x.inputs * min(x.inputs, probes) for x in self.mapped())
        roots = sum((FLOAT + DOUBLE) * x.inputs * r + FLOAT * r for x in self.mapped())
        gathers = 0.0
        if self.sharded:
            rounds = PASSES / min(self.n, PASSES)
            gathers = 2 * rounds * self.ring * FLOAT * self.model.parameters()
        return moments + roots + gathers

    # -- operations per step

    def ordinary(self) -> float:
        rows = self.setting.sequences * self.setting.tokens
        return 6 * rows * sum(x.outputs * x.inputs for x in self.model.linears())

    def norms(self) -> float:
        b, s = self.setting.sequences, self.setting.tokens
        return sum(
            2 * b * min(s * s * (x.outputs + x.inputs), s * x.outputs * x.inputs)
            for x in self.model.linears()
        )

    def mapping(self) -> float:
        rows, r = self.setting.sequences * self.setting.tokens, self.setting.rank
        return sum(4 * r * x.inputs * (rows + x.outputs) for x in self.mapped())

    def refresh(self) -> float:
        """Of one refresh, per device."""
        rows = PROBES * self.setting.tokens
        passes = 6 * rows * sum(x.outputs * x.inputs for x in self.model.linears())
        passes += sum(2 * rows * x.inputs**2 for x in self.mapped())
        vectors = sum(10 * x.inputs**2 * (self.setting.rank + OVERSAMPLE) for x in self.mapped())
        return passes / min(self.n, PASSES) + vectors / self.n

    def noise(self) -> float:
        """Integer operations."""
        return INTEGER_OPERATIONS * self.share * self.model.parameters()


def costs(setting: Setting) -> Iterator[tuple[str, Cost]]:
    for model in MODELS:
        yield f"{model.name}, one device", Cost(model, 1, False, setting)
        for n in DEVICES:
            yield f"{model.name}, DDP, {n}", Cost(model, n, False, setting)
            yield f"{model.name}, FSDP2, {n}", Cost(model, n, True, setting)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f}"


def tables(setting: Setting) -> dict[str, str]:
    """The tables by their titles."""
    model_rows = [
        [
            model.name,
            f"{model.parameters() / 1e9:.2f}",
            str(model.blocks),
            str(model.width),
            str(model.hidden),
            str(model.keys),
            str(model.vocabulary),
        ]
        for model in MODELS
    ]
    memory, sent, work = [], [], []
    for name, cost in costs(setting):
        memory.append(
            [
                name,
                gigabytes(cost.state()),
                gigabytes(cost.captured_inputs()),
                gigabytes(cost.captured_extra()),
                gigabytes(cost.maps()),
                gigabytes(cost.correlated()),
            ]
        )
        if cost.n > 1:
            sent.append(
                [
                    name,
                    gigabytes(cost.sent()),
                    f"{cost.control():.0f}",
                    gigabytes(cost.refresh_bytes()),
                    f"{100 * cost.refresh_bytes() / EVERY / cost.sent():.1f}%",
                ]
            )
        ordinary = cost.ordinary()
        private = 1 + cost.norms() / ordinary
        kfc = private + (cost.mapping() + cost.refresh() / EVERY) / ordinary
        noise = INTEGER_SLOWDOWN * cost.noise() / ordinary
        work.append(
            [
                name,
                f"{ordinary / 1e12:.1f}",
                f"{private:.2f}",
                f"{kfc:.2f}",
                f"{100 * cost.refresh() / EVERY / ordinary:.1f}%",
                f"{cost.noise() / 1e9:.0f}",
                f"{100 * noise:.2f}%",
            ]
        )
    lengths = []
    for model in MODELS:
        at = [
            Cost(model, 1, False, Setting(setting.sequences, tokens, setting.rank, setting.bands))
            for tokens in (128, 512, 1024, 2048, 4096)
        ]
        lengths.append([model.name, *(f"{1 + c.norms() / c.ordinary():.2f}" for c in at)])
    kept = f"correlated noise, {setting.bands} bands"
    return {
        "The models": markdown(
            ["", "parameters, 10⁹", "blocks", "width", "hidden", "keys", "vocabulary"], model_rows
        ),
        "Memory of one device, GB": markdown(
            [
                "",
                "weights, sums, Adam",
                "inputs of layers",
                "**extra:** output gradients",
                "**extra:** maps",
                f"**extra:** {kept}",
            ],
            memory,
        ),
        "Sent by one device, GB": markdown(
            [
                "",
                "per step, ordinary and private",
                "**extra:** control, bytes",
                "**extra:** one refresh",
                "refresh per step",
            ],
            sent,
        ),
        "Operations of one device": markdown(
            [
                "",
                "ordinary step, 10¹²",
                "DP-SGD",
                "DP-KFC",
                "of it refresh",
                "noise, 10⁹ integer",
                "noise, share of a step",
            ],
            work,
        ),
        "Operations of DP-SGD by tokens per sequence": markdown(
            ["", "128", "512", "1024", "2048", "4096"], lengths
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=Setting.sequences, help="per device")
    parser.add_argument("--tokens", type=int, default=Setting.tokens, help="per sequence")
    parser.add_argument("--rank", type=int, default=Setting.rank, help="of the maps")
    parser.add_argument("--bands", type=int, default=Setting.bands, help="of correlated noise")
    chosen = parser.parse_args()
    for title, table in tables(Setting(**vars(chosen))).items():
        print(f"{title}\n\n{table}\n")


if __name__ == "__main__":
    main()
