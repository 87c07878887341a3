"""Who takes part in the benchmark, what each is called, and whom it is compared with. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PEER = "peer:"
"""What the names of contenders from a file begin with; the file's path follows."""


@dataclass(frozen=True)
class Way:
    """One way to run a training step.

    Attributes:
        label: what tables call it.
        base: the contender that its speed-up is over.
        takes: what can be added to its name: ``compile`` (the model is compiled), ``fuse`` (the optimizer's kernels are
            torch's fused ones).
        cuda: whether it needs a CUDA device.
        wraps: whether it puts something else in the place of the model's call in any case.
    """

    label: str
    base: str = "eager"
    takes: tuple[str, ...] = ("compile", "fuse")
    cuda: bool = False
    wraps: bool = False


WAYS = {
    "eager": Way("eager loop"),
    "reduce_overhead": Way("torch.compile, reduce-overhead", takes=("fuse",), cuda=True, wraps=True),
    "make_graphed": Way("make_graphed_callables", takes=("fuse",), cuda=True, wraps=True),
    "tensordict": Way("tensordict CudaGraphModule", cuda=True),
    "floor": Way("CUDA graph by hand (floor)", cuda=True),
    "graph_step": Way("graph_step"),
    "trainer": Way("Trainer", base="trainer"),
    "trainer_callback": Way("Trainer + GraphPlanCallback", base="trainer"),
    "typical": Way("typical Trainer", base="typical", takes=("compile",)),
    "typical_callback": Way("typical Trainer + GraphPlanCallback", base="typical"),
}


@dataclass(frozen=True)
class Contender:
    """A way and what is added to it, as in ``graph_step+compile+fuse``; or a user's file."""

    name: str

    @property
    def way(self) -> str:
        """The name without what is added; ``peer`` for a file."""
        return "peer" if self.name.startswith(PEER) else self.name.split("+")[0]

    @property
    def peer(self) -> Path:
        """The file of a peer."""
        return Path(self.name.removeprefix(PEER))

    @property
    def added(self) -> list[str]:
        """What is added to the way."""
        return [] if self.way == "peer" else self.name.split("+")[1:]

    @property
    def compile(self) -> bool:
        """Whether the model is compiled with the compiler's default mode."""
        return "compile" in self.added

    @property
    def fuse(self) -> bool:
        """Whether the optimizer's kernels are the fused ones."""
        return "fuse" in self.added

    @property
    def replays(self) -> bool:
        """Whether most of its steps are launches of graphs."""
        return self.way not in ("eager", "trainer", "typical")

    @property
    def wraps_model(self) -> bool:
        """Whether something else stands in the place of the model's call."""
        return self.compile or (self.way in WAYS and WAYS[self.way].wraps)

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.way == "peer":
            return f"peer: {self.peer.stem}"
        said = {"compile": ", compiled", "fuse": ", fused"}
        return WAYS[self.way].label + "".join(said[part] for part in self.added) if self.way in WAYS else self.name

    @property
    def floor(self) -> str:
        """The hand-written graph that it is held against: the one with the same compilation and optimizer kernels."""
        compiled = self.compile or self.way == "reduce_overhead"
        return "floor" + "+compile" * compiled + "+fuse" * self.fuse

    @property
    def base(self) -> str:
        """The plain contender that its speed-up is over."""
        return WAYS[self.way].base if self.way in WAYS else "eager"


CONTENDERS = tuple(
    way + compiled + fused
    for way in WAYS
    for compiled in ("", "+compile")
    for fused in ("", "+fuse")
    if set((compiled + fused).split("+")[1:]) <= set(WAYS[way].takes)
)
"""Every name that a contender can have, peers excepted."""

_FLOORS = ("floor", "floor+fuse", "floor+compile", "floor+compile+fuse")
_TYPICAL = ("typical", "typical_callback")
_ADDED = ("+fuse", "+compile", "+compile+fuse")
_SMALL = ("mlp", "gpt", "resnet")


@dataclass(frozen=True)
class Choice:
    """A part of the benchmark that one run can measure: workloads, contenders, and the minutes that an H200 takes."""

    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    minutes: int


_PAIRS = ("eager", "floor", "graph_step", "trainer", "trainer_callback", *_TYPICAL)
SETS = {
    "core": Choice(
        ("mlp2", "transformer4", *_SMALL),
        ("eager", *_FLOORS, "graph_step", *_TYPICAL, *(f"typical_callback{added}" for added in _ADDED)),
        12,
    ),
    "rivals": Choice(
        _SMALL,
        ("eager", "eager+compile", "reduce_overhead", "make_graphed", "tensordict", "floor", "floor+compile",
         "graph_step", "graph_step+fuse", "graph_step+compile", "graph_step+compile+fuse", "typical+compile"),
        9,
    ),
    "bare": Choice(
        _SMALL,
        ("eager", "eager+fuse", "floor", "floor+fuse", "graph_step+fuse", "trainer", "trainer+fuse", "trainer_callback",
         "trainer_callback+fuse"),
        5,
    ),
    "large": Choice(tuple(f"{name}_large" for name in _SMALL), ("eager", "floor", "graph_step", *_TYPICAL), 8),
    "gpt2": Choice(("gpt2", "gpt2_small", "gpt2_large"), _PAIRS, 23),
    "other": Choice(("sac", "sac_large", "pinn", "pinn_large"), _PAIRS, 9),
}  # fmt: skip
SETS["all"] = Choice(
    tuple(dict.fromkeys(name for chosen in SETS.values() for name in chosen.workloads)),
    tuple(name for name in CONTENDERS if any(name in chosen.contenders for chosen in SETS.values())),
    108,
)
"""Parts of the benchmark by name. A device takes part with those of the workloads that it has."""
CPU_SECONDS = 25
"""What one process takes with ``--cpu`` on two cores, on average over the core set."""
