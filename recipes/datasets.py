"""Real data that needs no download: scikit-learn's bundled digits and the source text of Python's standard library."""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

# Files that every supported Python has under the same name; sorted, so that the text is the same on every machine
# that runs the same Python version.
STDLIB_FILES = (
    "argparse.py", "ast.py", "bisect.py", "calendar.py", "cmd.py", "codecs.py", "collections/__init__.py",
    "configparser.py", "contextlib.py", "copy.py", "csv.py", "dataclasses.py", "difflib.py", "enum.py",
    "fractions.py", "functools.py", "heapq.py", "inspect.py", "json/decoder.py", "json/encoder.py",
    "logging/__init__.py", "optparse.py", "pdb.py", "pickle.py", "queue.py", "random.py", "shlex.py", "shutil.py",
    "statistics.py", "subprocess.py", "tarfile.py", "textwrap.py", "threading.py", "typing.py", "unittest/case.py",
    "unittest/mock.py",
)  # fmt: skip
ALPHABET = string.printable
UNKNOWN = len(ALPHABET)
VOCABULARY = UNKNOWN + 1
DIGITS_FEATURES = 64
DIGITS_CLASSES = 10


class TensorBatches(TensorDataset):
    """A ``TensorDataset`` that a loader indexes once for each batch, not once for each sample."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """The batch of ``indices``; a loader that finds this method asks for whole batches."""
        return tuple(tensor[indices] for tensor in self.tensors)


Splits = tuple[TensorBatches, TensorBatches]


def digits_splits(*, val_fraction: float = 0.2, seed: int = 0) -> Splits:
    """The 1797 handwritten 8x8 digits as (training, validation) sets of flat images in [0, 1] and labels."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.data).float() / 16.0
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = round(len(labels) * (1.0 - val_fraction))
    train, val = order[:cut], order[cut:]
    return TensorBatches(images[train], labels[train]), TensorBatches(images[val], labels[val])


def read_stdlib(files: Sequence[str] = STDLIB_FILES) -> str:
    """The text of the standard library's ``files``, one after the other.

    Raises:
        FileNotFoundError: if this Python ships its library without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in files if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the standard library in {root} has no {', '.join(missing)}: this recipe reads its sources, "
            "so use a Python that ships them as files"
        )
    return "\n".join((root / name).read_text(encoding="utf-8") for name in files)


def encode(text: str) -> Tensor:
    """``text`` as numbers: printable ASCII by its place in :data:`ALPHABET`, everything else :data:`UNKNOWN`."""
    table = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([table.get(character, UNKNOWN) for character in text])


def decode(tokens: Tensor) -> str:
    """The text of ``tokens``, with the replacement character for :data:`UNKNOWN`."""
    return "".join((ALPHABET + "\N{REPLACEMENT CHARACTER}")[token] for token in tokens.tolist())


def text_windows(text: str, block_size: int) -> TensorBatches:
    """Windows of ``block_size`` characters that do not overlap, each with the same window one character on."""
    tokens = encode(text)
    windows = (len(tokens) - 1) // block_size
    if windows < 1:
        raise ValueError(
            f"a text of {len(tokens)} characters holds no window of block_size={block_size} and a target: use a longer "
            "text or a smaller block_size"
        )
    span = windows * block_size
    return TensorBatches(tokens[:span].view(windows, block_size), tokens[1 : span + 1].view(windows, block_size))


def stdlib_splits(block_size: int, *, val_fraction: float = 0.1, files: Sequence[str] = STDLIB_FILES) -> Splits:
    """The standard library's text as (training, validation) windows; the last part of the text is for validation."""
    text = read_stdlib(files)
    cut = round(len(text) * (1.0 - val_fraction))
    return text_windows(text[:cut], block_size), text_windows(text[cut:], block_size)
