"""Training: configs, the trainer, rows, log-probs, metrics."""
