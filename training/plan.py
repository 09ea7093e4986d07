"""Shim."""

from training.cluster import print_plan
from training.memory import BatchPlan, choose_batch, describe_plan, loss_chunks

__all__ = ["BatchPlan", "choose_batch", "describe_plan", "loss_chunks", "print_plan"]
