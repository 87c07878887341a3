"""What is measured: steps beside eager ones and hand-written graphs (``python -m recipes.benchmarks``), and parts."""
