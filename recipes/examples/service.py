"""A service: FastAPI serves a classifier of handwritten digits, whose calls are replays at a few capture sizes.

python recipes/examples/service.py      (needs fastapi, httpx, scikit-learn; asks itself and prints latencies)
uvicorn --app-dir recipes/examples service:app      (serves)
"""

from statistics import quantiles
from time import perf_counter

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graphed

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16.0).float().to(device), torch.tensor(digits.target).to(device)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(200):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()

fast = graphed(model.eval(), shapes="bucket", buckets=[1, 4, 16, 64])
with torch.inference_mode():
    fast.prewarm(example=(images[:1],))  # before the first request
app = FastAPI()


@app.post("/classify")
def classify(pixels: list[list[float]]) -> list[int]:
    """The digits in images of 64 numbers between 0 and 1. Requests that come together take turns."""
    with torch.inference_mode():
        scores: Tensor = fast(torch.tensor(pixels, device=device))
    return scores.argmax(-1).tolist()


def main() -> None:
    """Ask the service for batches of one to forty images, and print how long that took."""
    client, seconds, right = TestClient(app), [], 0
    for count in list(range(1, 41)) * 3:
        body = images[:count].tolist()
        begin = perf_counter()
        answer = client.post("/classify", json=body).raise_for_status().json()
        seconds.append(perf_counter() - begin)
        right += answer == labels[:count].tolist()
    cuts = quantiles(seconds, n=100)
    print(f"{len(seconds)} requests, all digits right in {right}")
    print(f"latency with HTTP and JSON: p50 {1e3 * cuts[49]:.1f} ms, p99 {1e3 * cuts[98]:.1f} ms")
    print(fast.report())


if __name__ == "__main__":
    main()
