"""Embeddings of a stream of texts of all lengths: capture sizes fitted to the lengths, and a mask for what is padding.

    python -m recipes.embed_stream --backend tape

A CPU shows that texts of all lengths share a few programs, and that a mask makes padding harmless. It cannot show a
gain, and loses time: the tape replays operators one by one, on padded batches. The gain is that of a CUDA graph.

The texts are paragraphs of the standard library's source. They come in batches, each padded to a capture size in both
dimensions; the encoder is told by a mask which characters are real.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import buckets, graphed
from recipes.comparison import now
from recipes.datasets import VOCABULARY, encode, read_stdlib
from recipes.latencies import device_of, print_latencies, print_limits, require_close

_LONGEST = 256


class Encoder(nn.Module):
    """Two layers of attention among the real characters, and their mean: one vector for each text."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.characters = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(layers)])
        self.feed = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Vectors ``[batch, width]`` of ``tokens``, which are ``[batch, time]``, the first ``lengths`` of them real."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        x = self.characters(tokens)
        for qkv, feed in zip(self.qkv, self.feed, strict=True):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
            x = x + F.gelu(feed(mixed.transpose(1, 2).flatten(2)))
        total: Tensor = (x * real[..., None]).sum(1)
        return F.normalize(total / lengths[:, None], dim=-1)


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of one to eight paragraphs, as long as the longest in them; the same every time."""
    texts = [part[:_LONGEST] for part in read_stdlib().split("\n\n") if len(part) > 3]
    rng = random.Random(0)
    batches = []
    for _ in range(count):
        chosen = [encode(text) for text in rng.sample(texts, rng.randint(1, 8))]
        lengths = torch.tensor([len(tokens) for tokens in chosen])
        batches.append((nn.utils.rnn.pad_sequence(chosen, batch_first=True), lengths))
    return batches


def run(
    model: Callable[[Tensor, Tensor], Tensor], batches: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[list[Tensor], list[float]]:
    """The embeddings of each batch, and the seconds that each took."""
    results, seconds = [], []
    for tokens, lengths in batches:
        start = now(device)
        results.append(model(tokens, lengths))
        seconds.append(now(device) - start)
    return results, seconds


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--sizes", type=int, default=6, help="capture sizes of the length")
    args, device = device_of(parser, argv)
    print_limits(device, "that few programs embed texts of all lengths", "padding is computed, too")
    model = Encoder().to(device).eval()
    batches = [(tokens.to(device), lengths.to(device)) for tokens, lengths in make_batches(args.batches)]
    ladder = buckets.fit([tokens.shape[1] for tokens, _ in batches], args.sizes, multiple_of=8)
    print(f"lengths: {ladder}")

    expected, eager = run(model, batches, device)
    # A text of length 0 would have no mean; what is computed for one that is padding is cut off.
    fast: Any = graphed(
        model,
        shapes="bucket",
        buckets={0: [1, 2, 4, 8], 1: ladder},
        dynamic={"tokens": (0, 1)},
        pad={"lengths": 1},
        backend=args.backend,
    )
    print(f"captured before the first request: {fast.prewarm(example=batches[0])} sizes")
    found, _ = run(fast, batches, device)
    _, replayed = run(fast, batches, device)
    print(fast.report())
    print_latencies({"embed, eager": eager, "embed, replayed": replayed})
    print(require_close(expected, found))


if __name__ == "__main__":
    main()
